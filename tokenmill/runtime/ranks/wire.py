"""What rank 0 tells the others: a message for everything that touches the model or its pages, in the order of events.

A rank does nothing by itself, so whatever decides which exchanges take place is in these messages: the batch as tensors
(drafts included), how many logits are read, which drafts held, page copies. A step is told as the Batch that rank 0
built: no rank keeps requests. Frames are msgpack; tensors travel as their bytes.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from tokenmill.checkpoint.adapters.adapter import Adapter, AdapterMatrix
from tokenmill.types import Batch

_DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}
_Array = tuple[str, list[int], bytes]  # dtype, shape, content
# The fields of a Batch that are tensors, and those that are tuples of them.
_TENSORS = (
    "token_ids",
    "positions",
    "query_starts",
    "seq_lens",
    "logit_rows",
    "ancestors",
    "state_slots",
    "state_targets",
    "adapter_slots",
)
_GROUPED = ("slots", "block_tables")


class Step(msgspec.Struct, tag=True, array_like=True):
    """Compute the batch and store its keys and values."""

    number: int
    tensors: list[_Array | None]  # in the order of _TENSORS
    grouped: list[list[_Array]]  # of _GROUPED, by KV group
    max_query: int
    max_seq: int
    begins: list[int]
    drafted: list[int]
    all_hidden: bool
    num_pieces: int


class Logits(msgspec.Struct, tag=True, array_like=True):
    """Compute rows [begin, end) of the logits of the last step."""

    begin: int
    end: int


class Head(msgspec.Struct, tag=True, array_like=True):
    """Multiply these states, as the final norm gives them, by the head with this adapter."""

    states: _Array
    adapter_slot: int


class Settle(msgspec.Struct, tag=True, array_like=True):
    """So many tokens of each drafted row of the last step hold."""

    kept: list[int]


class Copies(msgspec.Struct, tag=True, array_like=True):
    """Copy pages and state slots, before the step that follows."""

    pages: list[tuple[int, int]]
    states: list[tuple[int, int]]


class Move(msgspec.Struct, tag=True, array_like=True):
    """Move the tokens of an accepted branch of a tree of drafts, as KVStore.move_tokens."""

    tables: list[list[int]]
    first: int
    path: list[int]


class Matrix(msgspec.Struct, array_like=True):
    """An AdapterMatrix."""

    name: str
    a: _Array
    b: _Array
    scale: float
    magnitude: _Array | None


class Adapt(msgspec.Struct, tag=True, array_like=True):
    """Rows of this slot have this adapter from now on: the whole one, of which a rank takes its part. It is encoded
    once, before its slot is known: the slot is told by `Use`."""

    name: str
    matrices: list[Matrix]
    saved: list[tuple[str, _Array]]


class Use(msgspec.Struct, tag=True, array_like=True):
    """The adapter told just before goes into this slot; without one, the slot is emptied."""

    slot: int
    is_empty: bool = False


class Names(msgspec.Struct, tag=True, array_like=True):
    """The matrices of one rank that can take an adapter."""

    values: list[str]


class Compare(msgspec.Struct, tag=True, array_like=True):
    """Answer with the trace of all exchanges so far."""


class Stop(msgspec.Struct, tag=True, array_like=True):
    pass


class Numbers(msgspec.Struct, tag=True, array_like=True):
    """Of one rank, or (from rank 0) those that all agree on."""

    values: list[int]


class Broken(msgspec.Struct, tag=True, array_like=True):
    """A rank cannot go on."""

    reason: str
    follows: bool  # another rank was at fault: an exchange with it failed


Message = Step | Logits | Head | Settle | Copies | Move | Adapt | Use | Names | Compare | Stop | Numbers | Broken
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(frame: bytes) -> Message:
    message: Message = _decoder.decode(frame)
    return message


def head_of(states: Tensor, adapter_slot: int) -> Head:
    return Head(_array(states.float()), adapter_slot)


def states_of(message: Head) -> Tensor:
    return _tensor(message.states)


def adapt_of(adapter: Adapter) -> Adapt:
    matrices = [
        Matrix(
            each.name,
            _array(each.a),
            _array(each.b),
            each.scale,
            None if each.magnitude is None else _array(each.magnitude),
        )
        for each in adapter.matrices.values()
    ]
    return Adapt(adapter.name, matrices, [(name, _array(tensor.float())) for name, tensor in adapter.saved.items()])


def adapter_of(message: Adapt) -> Adapter:
    matrices = {
        each.name: AdapterMatrix(
            each.name,
            _tensor(each.a),
            _tensor(each.b),
            each.scale,
            None if each.magnitude is None else _tensor(each.magnitude),
        )
        for each in message.matrices
    }
    return Adapter(message.name, matrices, {name: _tensor(array) for name, array in message.saved})


def step_of(batch: Batch, number: int, num_pieces: int = 1) -> Step:
    return Step(
        number,
        [None if (tensor := getattr(batch, name)) is None else _array(tensor) for name in _TENSORS],
        [[_array(each) for each in getattr(batch, name)] for name in _GROUPED],
        batch.max_query,
        batch.max_seq,
        list(batch.begins),
        list(batch.drafted),
        batch.all_hidden,
        num_pieces,
    )


def batch_of(step: Step, device: torch.device | None = None) -> Batch:
    """On this device; None: the CPU."""

    def read(array: _Array) -> Tensor:
        return _tensor(array) if device is None else _tensor(array).to(device)

    fields: dict[str, Any] = {
        name: None if array is None else read(array) for name, array in zip(_TENSORS, step.tensors, strict=True)
    }
    for name, arrays in zip(_GROUPED, step.grouped, strict=True):
        fields[name] = tuple(map(read, arrays))
    return Batch(
        **fields,
        max_query=step.max_query,
        max_seq=step.max_seq,
        begins=tuple(step.begins),
        drafted=tuple(step.drafted),
        all_hidden=step.all_hidden,
    )


def _array(tensor: Tensor) -> _Array:
    values = tensor.cpu().contiguous().numpy()
    return str(values.dtype), list(values.shape), values.tobytes()


def _tensor(array: _Array) -> Tensor:
    name, shape, content = array
    if not content:
        return torch.empty(shape, dtype=_DTYPES[name])
    return torch.frombuffer(bytearray(content), dtype=_DTYPES[name]).view(shape)
