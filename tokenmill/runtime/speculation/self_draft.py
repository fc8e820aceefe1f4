"""The target as its own drafter: its first layers with an early exit, or all of them with fewer bits.

`self:layers=N` runs the first N blocks, then the final norm and the head. Their keys and values are exactly those that
the target computes for the same tokens, so it reads and writes the target's own pages: no extra memory, no prefill.
`self:TYPE` keeps a second copy of the matrices quantized to a smaller type (on a CPU a ggml block type such as q2_k, on
a GPU int4 or fp8) and is otherwise a draft model like any other.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch

from tokenmill.checkpoint.base import Checkpoint, StoredTensor
from tokenmill.config import ResolvedConfig
from tokenmill.errors import UserError
from tokenmill.kernels import cpu
from tokenmill.kernels.ggml_types import TYPES
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.formats.ggml import GgmlWeight
from tokenmill.model.loader import load_model
from tokenmill.model.reader import WeightReader
from tokenmill.runtime.executors import choose_executor
from tokenmill.runtime.executors.base import Draft
from tokenmill.runtime.speculation.base import Drafter, Target
from tokenmill.runtime.speculation.chain import ChainDrafting
from tokenmill.runtime.speculation.draft_model import DraftModel
from tokenmill.types import ScheduledTokens

_CPU_TYPES = ("Q2_K", "Q3_K", "Q4_0", "Q4_K", "Q5_0", "Q5_K")
_GPU_TYPES = ("int4", "fp8")
_UNQUANTIZED = ("model.embed_tokens", "lm_head")  # quantizing these costs more acceptance than it saves time


class SelfDraft:
    """Chooses between the two kinds by the argument."""

    name = "self"
    needs_training = False
    computes = True

    @classmethod
    def search_arguments(cls, device: str, num_layers: int) -> tuple[str, ...]:
        """The fewest bits, and the first half of the layers."""
        kind = _GPU_TYPES[0] if device == "cuda" else _CPU_TYPES[0]
        return (kind.lower(), *((f"layers={num_layers // 2}",) if num_layers > 1 else ()))

    @classmethod
    def build(cls, argument: str, target: Target) -> Drafter:
        option, _, value = argument.partition("=")
        if option == "layers":
            return EarlyExit.build(value, target)
        if argument:
            return _fewer_bits(argument, target)
        raise UserError("--speculate self needs an argument", "write --speculate self:layers=N or self:q2_k")


class EarlyExit(Drafter):
    name = "self:layers"
    computes = True

    def __init__(self, num_layers: int, target: Target) -> None:
        decoder = copy.copy(target.model.decoder)
        decoder.blocks = decoder.blocks[:num_layers]
        model = replace(target.model, decoder=decoder)
        config = _small_steps(target.config)
        executor, _ = choose_executor(config.executor, model, target.store, config)
        self._chain = ChainDrafting(executor, target.executor.sampler, decoder.description.vocab_size)

    @classmethod
    def build(cls, argument: str, target: Target) -> EarlyExit:
        max_layers = len(target.model.decoder.blocks) - 1
        if not argument.isdigit() or not 1 <= int(argument) <= max_layers:
            raise UserError(f"self:layers={argument} is not a number of layers", f"give 1 to {max_layers}")
        if target.store.is_coded:
            raise UserError(
                f"self:layers shares the target's KV pages, and {target.store.name} pages cannot be written twice",
                "use --kv-cache-dtype auto, or another drafter",
            )
        return cls(int(argument), target)

    def draft(self, rows: Sequence[ScheduledTokens], limits: Sequence[int]) -> list[Draft]:
        limits = [0 if row.num_dropped else limit for row, limit in zip(rows, limits, strict=True)]
        return self._chain.draft(rows, [row.start for row in rows], limits)


def _small_steps(config: ResolvedConfig) -> ResolvedConfig:
    """A drafting step has one token of each sequence: its buffers need no room for prompts."""
    return replace(config, batch_tokens=min(config.batch_tokens, max(config.concurrency, 1)))


def _fewer_bits(name: str, target: Target) -> DraftModel:
    device, config, checkpoint = target.model.device, target.config, target.model.checkpoint
    if device.type == "cuda":
        if name not in _GPU_TYPES:
            raise UserError(f"self:{name} is not a weight type for GPUs", f"use self:{' or self:'.join(_GPU_TYPES)}")
        return DraftModel(
            load_model(checkpoint, device, config.context, config.kernels, name, dtype=target.model.dtype), target
        )
    if name.upper() not in _CPU_TYPES or cpu.unavailable(device):
        known = ", ".join(name.lower() for name in _CPU_TYPES)
        raise UserError(f"self:{name} is not a weight type that this machine can quantize to", f"use one of {known}")
    reader = _QuantizingReader(checkpoint, name.upper())
    return DraftModel(load_model(checkpoint, device, config.context, config.kernels, reader=reader), target)


class _QuantizingReader(WeightReader):
    """Quantizes every matrix of the blocks to a ggml type; those whose rows are no multiple of its block size stay as
    they are."""

    def __init__(self, checkpoint: Checkpoint, type_name: str) -> None:
        super().__init__(checkpoint)
        self._type = TYPES[type_name]

    def linear(self, prefix: str, out_features: int, in_features: int, bias: bool = False) -> LinearWeight:
        weight = super().linear(prefix, out_features, in_features, bias)
        if prefix in _UNQUANTIZED or in_features % self._type.block_size:
            return weight
        blocks = torch.empty(out_features, self._type.row_bytes(in_features), dtype=torch.uint8)
        rows = weight.dequantize(0, out_features).float().contiguous()
        cpu.module().quantize_rows(cpu.pool(), self._type.name, rows, None, blocks)
        rounded = GgmlWeight(StoredTensor(f"{prefix}.weight", (out_features, in_features), self._type.name, blocks))
        rounded.bias, rounded.precise = weight.bias, weight.precise
        self.weights[prefix] = rounded
        return rounded
