"""Our reader of GGUF files (version 2 and 3, little endian): tensor table and memory-mapped tensors.

Every offset, size and type is checked when the file is opened, so a tensor that is listed can be read. Nothing is
converted or copied. Opened through open.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.checkpoint import gguf_latent, gguf_recurrent
from tokenmill.checkpoint.base import StoredTensor
from tokenmill.checkpoint.fields import shown
from tokenmill.checkpoint.gguf_description import LONGROPE_FACTORS, describe, read_architecture
from tokenmill.checkpoint.gguf_header import HEADER_BYTES, read_header
from tokenmill.checkpoint.gguf_metadata import Cursor, Metadata, read_metadata
from tokenmill.checkpoint.gguf_names import canonical_name
from tokenmill.checkpoint.mapped_array import ARRAY_TYPES, view_array
from tokenmill.checkpoint.mapped_array import take_view as take_array
from tokenmill.checkpoint.mapped_file import map_file, release_pages
from tokenmill.checkpoint.tensor_views import TensorView, split_fused
from tokenmill.errors import CheckpointError
from tokenmill.kernels.ggml_types import TYPES_BY_NUMBER, UNREAD_TYPE_NAMES, GGMLType

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    """A row of the tensor table. `offset` counts from the start of the data part."""

    name: str  # as in the file
    shape: tuple[int, ...]  # row-major
    layout: GGMLType
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.layout.block_size * self.layout.block_bytes


class GGUFCheckpoint:
    """A Checkpoint in one GGUF file. `metadata` is for the tokenizer and chat template builders."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._buffer = map_file(path, HEADER_BYTES)
        cursor = Cursor(self._buffer, path.name)
        num_tensors, num_pairs = read_header(cursor)
        self.metadata: Metadata = read_metadata(cursor, num_pairs)
        architecture = read_architecture(self.metadata, path.name)
        entries = _read_tensor_table(cursor, num_tensors)
        self._data_start = _data_start(cursor, self.metadata)
        stored_names = {entry.name for entry in entries}
        self._entries: dict[str, _TensorEntry] = {}  # by canonical name, fused matrices as they are
        for entry in entries:
            _check_place(cursor, entry, self._data_start)
            name = canonical_name(architecture, entry.name, stored_names)
            if name in self._entries:
                raise cursor.damaged(f"tensor '{entry.name}' occurs twice")
            shape = gguf_recurrent.stored_shape(name, gguf_latent.stored_shape(name, entry.shape))
            self._entries[name] = replace(entry, shape=shape)
        shapes = {name: entry.shape for name, entry in self._entries.items()}
        self.description = describe(self.metadata, shapes, path.name, self._numbers)
        # The factors of longrope are part of the description now.
        views = {name: TensorView((name,)) for name in self._entries if name not in LONGROPE_FACTORS}
        self._views = split_fused(self.description, views, grouped_qkv=False)

    def _numbers(self, name: str) -> tuple[float, ...]:
        """A float32 vector, without torch; empty where there is none."""
        entry = self._entries.get(name)
        if entry is None or entry.layout.name != "F32":
            return ()
        values = np.frombuffer(self._buffer, np.float32, math.prod(entry.shape), self._data_start + entry.offset)
        return tuple(values.tolist())

    def names(self) -> Iterable[str]:
        return self._views.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._views

    def tensor(self, name: str) -> StoredTensor:
        import torch  # here: reading only the metadata needs no torch

        from tokenmill.checkpoint.mapped_tensor import take_view, view_tensor

        view, entry, shape, start = self._place(name)
        dtype = getattr(torch, "uint8" if entry.layout.is_block else _DTYPES[entry.layout.name])
        data = take_view(view, [view_tensor(self._buffer, dtype, shape, start)])
        return StoredTensor(name, (data.shape[0], *entry.shape[1:]), entry.layout.name, data)

    def array(self, name: str) -> StoredTensor:
        """As `tensor`, without torch."""
        view, entry, shape, start = self._place(name)
        dtype = "uint8" if entry.layout.is_block else ARRAY_TYPES[entry.layout.name]
        data: Any = take_array(view, [view_array(self._buffer, dtype, shape, start)])
        return StoredTensor(name, (data.shape[0], *entry.shape[1:]), entry.layout.name, data)

    def _place(self, name: str) -> tuple[TensorView, _TensorEntry, tuple[int, ...], int]:
        """What the tensor is made of, and the shape and first byte of that."""
        if name not in self._views:
            raise CheckpointError(f"{self.path.name} has no tensor '{name}'", "the file may be of another model")
        view = self._views[name]
        entry = self._entries[view.sources[0]]
        shape = entry.shape
        if entry.layout.is_block:
            shape = (*shape[:-1], entry.layout.row_bytes(shape[-1]))
        return view, entry, shape, self._data_start + entry.offset

    def release(self, name: str) -> None:
        entry = self._entries[self._views[name].sources[0]]
        rows = math.prod(entry.shape[:-1])
        count = rows * entry.layout.row_bytes(entry.shape[-1]) if entry.shape else entry.layout.block_bytes
        release_pages(self._buffer, self._data_start + entry.offset, count)

    def float_type(self) -> str:
        return ""  # types of tensors say how they are stored, not what the model was trained to compute in

    def is_quantized(self) -> bool:
        return self._most(lambda layout: layout.is_block)

    def stores_halves(self) -> bool:
        return self._most(lambda layout: layout.name == "F16")

    def _most(self, holds: Callable[[GGMLType], bool]) -> bool:
        """Whether it holds for the types of most weights."""
        counts = [(math.prod(entry.shape), holds(entry.layout)) for entry in self._entries.values()]
        return 2 * sum(count for count, held in counts if held) > sum(count for count, _held in counts)

    def quantization(self) -> dict[str, object]:
        return {}


def read_gguf_tensors(path: Path) -> tuple[Metadata, dict[str, Tensor]]:
    """Metadata and plain tensors of a GGUF that is not a model (an importance matrix), by the names in the file."""
    import torch

    from tokenmill.checkpoint.mapped_tensor import view_tensor

    buffer = map_file(path, HEADER_BYTES)
    cursor = Cursor(buffer, path.name)
    num_tensors, num_pairs = read_header(cursor)
    metadata = read_metadata(cursor, num_pairs)
    entries = _read_tensor_table(cursor, num_tensors)
    start = _data_start(cursor, metadata)
    tensors = {}
    for entry in entries:
        _check_place(cursor, entry, start)
        if entry.layout.is_block:
            raise cursor.damaged(f"tensor '{entry.name}' has type {entry.layout.name}, a plain one is expected")
        dtype = getattr(torch, _DTYPES[entry.layout.name])
        tensors[entry.name] = view_tensor(buffer, dtype, entry.shape, start + entry.offset)
    return metadata, tensors


def _read_tensor_table(cursor: Cursor, num_tensors: int) -> list[_TensorEntry]:
    smallest_entry = 8 + 1 + 4 + 8 + 4 + 8
    if num_tensors > cursor.left // smallest_entry:
        raise cursor.damaged(f"the header promises {num_tensors} tensors, more than the file can hold")
    return [_read_tensor_entry(cursor) for _ in range(num_tensors)]


def _read_tensor_entry(cursor: Cursor) -> _TensorEntry:
    name = cursor.name("a tensor name")
    num_dimensions = cursor.u32()
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise cursor.damaged(f"tensor '{name}' has {num_dimensions} dimensions")
    dimensions = [cursor.u64() for _ in range(num_dimensions)]  # fastest first
    number = cursor.u32()
    layout = TYPES_BY_NUMBER.get(number)
    if layout is None:
        known = UNREAD_TYPE_NAMES.get(number, f"number {number}")
        raise CheckpointError(
            f"{cursor.label}: tensor '{name}' has ggml type {known}, which is not supported",
            f"use a file with {', '.join(sorted(kind.name for kind in TYPES_BY_NUMBER.values() if kind.is_block))}",
        )
    if any(size == 0 for size in dimensions) or dimensions[0] % layout.block_size:
        raise cursor.damaged(f"tensor '{name}' of type {layout.name} cannot have dimensions {dimensions}")
    return _TensorEntry(name, tuple(reversed(dimensions)), layout, cursor.u64())


def _data_start(cursor: Cursor, metadata: Metadata) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise cursor.damaged(f"alignment {shown(alignment)} is not a power of two from 8 up")
    return (cursor.position + alignment - 1) // alignment * alignment


def _check_place(cursor: Cursor, entry: _TensorEntry, data_start: int) -> None:
    if entry.offset % 8:  # files pad to their alignment, which is at least this; any plain type is then aligned
        raise cursor.damaged(f"tensor '{entry.name}' starts at a misaligned offset")
    if data_start + entry.offset + entry.nbytes > cursor.end:
        missing = data_start + entry.offset + entry.nbytes - cursor.end
        raise cursor.damaged(f"tensor '{entry.name}' ends {missing} bytes past the end of the file")
