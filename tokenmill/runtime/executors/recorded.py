"""The recorded executor: the forward pass is described once to the C++ program, then each step is one call.

`RecordedOps` (recorded_ops.py) records what the model does; `RecordedExecutor` replays it for any batch up to the sizes
it was recorded for. Same results as the eager executor up to the order of float sums. Declines models with
weights or KV pages that the C++ kernels do not support. Computes with tensors, or with numpy arrays for a model that
was loaded without torch; the program reads both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.config import ResolvedConfig
from tokenmill.kernels import cpu
from tokenmill.kernels.cpu import CpuLinear
from tokenmill.kernels.host import address, empty, on_host
from tokenmill.model.attention.latent import HeadProjections
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.layers.experts import expert_layers
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.executors.base import StepInput, StepOutput
from tokenmill.runtime.executors.batched import BatchedExecutor, copied_rows
from tokenmill.runtime.executors.recorded_ops import RecordedOps, kernel_of
from tokenmill.types import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from tokenmill.kernels.ref_adapters import EmbeddingPart
    from tokenmill.model.adapters import AdapterSite

_INT64 = np.dtype(np.int64), "torch.int64"  # of an array, of a tensor
_INT32 = np.dtype(np.int32), "torch.int32"
_ROUNDED_BYTES = 1.5  # of a weight, up to which adapters are rounded to int8: a base of floats has 2 or more
_EXPERT_ACTIVATIONS = {"silu", "gelu_tanh"}  # that the C++ kernel of experts computes


class RecordedExecutor(BatchedExecutor):
    name = "recorded"
    runs_greedily = True
    takes_trees = True

    def __init__(self, model: LoadedModel, store: KVStore, config: ResolvedConfig) -> None:
        super().__init__(model, store, config)
        self._has_states = bool(store.layout.states)
        self.takes_trees = not self._has_states  # a state goes on along one branch only
        # A step never holds more tokens than the budget, nor more sequences than may run at once.
        self._tokens = max(config.batch_tokens, config.concurrency)
        self._pool = cpu.pool()
        self._on_host = on_host(model.device)
        self._logits = self._own(empty((0, model.decoder.description.vocab_size)))
        self._hold_logits(min(config.concurrency, self.max_logit_rows))
        self._record()

    def _record(self) -> None:
        model = self.model
        program = cpu.module().Program(self._tokens, self.config.concurrency, self._pool)
        ops = self.make_ops(program)
        hidden = model.decoder.forward(ops)
        program.end_body()
        program.finish(model.decoder.logits(ops, hidden))
        self._program = program
        self._keep = ops.keep
        self._products = ops.products
        self._hidden = self._own(program.value(hidden))

    def keep_layers(self, layers: tuple[int, ...]) -> str:
        self.model.decoder.kept_layers = layers
        self._record()
        return ""

    def _own(self, array: np.ndarray) -> Any:
        """An array of ours as callers see it."""
        if self._on_host:
            return array
        import torch

        return torch.as_tensor(array)

    def _hold_logits(self, rows: int) -> None:
        if rows > self._logits.shape[0]:
            self._logits = self._own(empty((rows, self._logits.shape[1])))
            self._logits_address = address(self._logits)

    def make_ops(self, program: Any) -> RecordedOps:
        return RecordedOps(program, self.store)

    @classmethod
    def declines(cls, model: LoadedModel, store: KVStore) -> str | None:
        reason = cpu.unavailable(model.device)
        if reason is not None:
            return reason
        has_pages = any(group.layers for group in store.layout.groups)
        if has_pages and any(store.kernel_pages(slot) is None for slot in range(store.layout.layers_per_page)):
            return f"KV pages of type {store.name} have no C++ kernel here"
        for name, weight in model.weights.items():
            kernel = weight.kernel.run if weight.kernel is not None else None
            if kernel is not None and not isinstance(kernel, (CpuLinear, HeadProjections)):
                return f"{name} ({weight.type_name}) has no C++ kernel"
        activations = {layer.routing.activation for layer in expert_layers(model.decoder.blocks)}
        if activations - _EXPERT_ACTIVATIONS:
            return f"experts with activation {', '.join(sorted(activations - _EXPERT_ACTIVATIONS))} have no C++ kernel"
        table = model.decoder.embedding
        if table.kernel is None and not cpu.can_look_up(table):
            return f"the embedding ({table.type_name}) has no C++ lookup"
        return None

    @property
    def nbytes(self) -> int:
        """Buffers of the program: activations, partial attention, scratch."""
        size: int = self._program.nbytes
        return size

    def hold_adapters(self, num_slots: int, max_rank: int) -> None:
        self._program.hold_adapters(num_slots)
        super().hold_adapters(num_slots, max_rank)
        assert self.adapters is not None
        self.adapters.watch_embeddings(self._set_embedding)

    def make_site(self, weights: Sequence[LinearWeight], num_slots: int, max_rank: int) -> AdapterSite:  # noqa: ARG002
        shapes = [(weight.out_features, weight.in_features) for weight in weights]
        packed = sum(kernel_of(weight).nbytes for weight in weights)
        exact = packed > _ROUNDED_BYTES * sum(rows * columns for rows, columns in shapes)
        from tokenmill.kernels.cpu_adapters import RecordedSite

        return RecordedSite(self._program, self._products[id(weights[0])], shapes, exact)

    def _set_embedding(self, slot: int, part: EmbeddingPart | None) -> None:
        from tokenmill.kernels.cpu_adapters import pack_embedding

        self._program.set_embedding(slot, None if part is None else pack_embedding(part))

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states [T, hidden], where batch.all_hidden; logits are computed in the same call when they are few
        enough to keep."""
        rows = batch.logit_rows.shape[0]
        if batch.begins:
            self.store.states.clear(batch.begins)
        self.run_program(batch, batch.logit_rows, body=True, head=0 < rows <= self.max_logit_rows)
        return self._hidden[: batch.token_ids.shape[0]]

    def logits(self, _hidden: Tensor, batch: Batch, begin: int, end: int) -> Tensor:
        """Float32 logits of batch.logit_rows[begin:end], until the next call. The program kept the hidden state."""
        if batch.logit_rows.shape[0] <= self.max_logit_rows:
            return self._logits[begin:end]
        self.run_program(batch, batch.logit_rows[begin:end], body=False, head=True)
        return self._logits[: end - begin]

    def step(self, work: StepInput) -> StepOutput[Tensor]:
        if len(work.rows) <= self.max_logit_rows and work.decodes and self._one_token_each(work):
            return self._decode(work)
        return super().step(work)

    def settle_drafts(self, kept: Sequence[int]) -> None:
        if self._has_states:
            self._program.settle(list(kept))

    def _one_token_each(self, work: StepInput) -> bool:
        return not work.drafts or all(work.length(number) == 1 for number in range(len(work.rows)))

    def _decode(self, work: StepInput) -> StepOutput[Tensor]:
        """One call into C++ for batch, forward pass and argmax: plain lists go in, token ids come back."""
        plain = self.sampler.is_plain([row.request for row in work.rows])
        steps = self._decode_greedily(work, work.max_run if plain else 1)
        return StepOutput(
            logits=lambda begin, end: self._logits[begin:end],
            hidden=lambda tokens: copied_rows(self._hidden, tokens),
            tokens=steps[-1] if plain else None,
            runs=[list(tokens) for tokens in zip(*steps, strict=True)] if len(steps) > 1 else None,
        )

    def _decode_greedily(self, work: StepInput, steps: int) -> list[list[int]]:
        """Up to `steps` decodes, each from the largest logits of the one before, until a row has chosen one of its stop
        ids. The tokens of each step, by row."""
        rows = work.rows
        begins = [row.state_slot for row in rows if row.start == 0] if self._has_states else []
        if begins:
            self.store.states.clear(begins)
        self._hold_logits(len(rows))
        best: list[list[int]] = self._program.decode(
            [self._token(work, number) for number in range(len(rows))]
            if work.drafts
            else [row.request.token_ids[row.start] for row in rows],
            [row.start for row in rows],
            [list(tables) for tables in zip(*(row.block_tables for row in rows), strict=True)],
            self._logits_address,
            steps,
            [list(row.request.stop_ids) for row in rows] if steps > 1 else [],
            [row.state_slot for row in rows] if self._has_states else [],
            [row.adapter_slot for row in rows] if any(row.adapter_slot for row in rows) else [],
        )
        return best

    @staticmethod
    def _token(work: StepInput, number: int) -> int:
        (token_id,) = work.token_ids(number)
        return token_id

    def run_program(self, batch: Batch, logit_rows: Tensor, body: bool, head: bool) -> bool:
        """False: the program exchanges with others, and one of them did not come; nothing that it left is of use."""
        rows = logit_rows.shape[0]
        if head:
            self._hold_logits(rows)
        tokens, sequences = batch.token_ids.shape[0], batch.seq_lens.shape[0]
        came: bool = self._program.run(
            tokens,
            sequences,
            _address(batch.token_ids, _INT64, tokens),
            _address(batch.positions, _INT64, tokens),
            _address(batch.query_starts, _INT32, sequences + 1),
            _address(batch.seq_lens, _INT32, sequences),
            [_address(slots, _INT64, tokens) for slots in batch.slots],
            [_address(table, _INT32, sequences * table.shape[1]) for table in batch.block_tables],
            [table.shape[1] for table in batch.block_tables],
            rows,
            _address(logit_rows, _INT64, rows),
            self._logits_address,
            body,
            head,
            batch.all_hidden,
            0 if batch.ancestors is None else _address(batch.ancestors, _INT64, tokens),
            0 if batch.state_slots is None else _address(batch.state_slots, _INT64, sequences),
            list(batch.drafted),
            0 if batch.adapter_slots is None else _address(batch.adapter_slots, _INT32, tokens),
        )
        return came


def _address(array: Any, dtype: tuple[np.dtype[Any], str], length: int) -> int:
    """The address of an array's values, after checking that they are laid out as the program reads them."""
    if isinstance(array, np.ndarray):
        assert array.dtype == dtype[0], array.dtype
        assert array.flags.c_contiguous
    else:
        assert str(array.dtype) == dtype[1], array.dtype
        assert array.is_contiguous()
    assert math.prod(array.shape) == length, array.shape
    return address(array)
