"""Which blocks a model can do without, by measurement: each one's absence is tried, the cheapest goes, and the rest is
tried again without it. The loss is that of the next token on calibration text.

The first and the last block stay: nothing else does their work. Used by the job before anything is rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.quantize.calibrate import CalibratedBlock
from tokenmill.quantize.calibration_ops import CalibrationOps
from tokenmill.quantize.source import FINAL_NORM, SourceModel

_log = get_logger(__name__)
MEASURED = 8  # sequences


def check_droppable(source: SourceModel, count: int) -> None:
    most = source.num_blocks - 2
    if count > most:
        raise UserError(f"{count} of {source.num_blocks} blocks cannot be dropped", f"give at most {max(0, most)}")
    if any(layer.states for layer in source.description.kv_layers()):
        raise UserError("blocks of recurrent models are not dropped", "leave --drop-layers out")


@torch.no_grad()
def choose_dropped(source: SourceModel, sequences: Tensor, count: int, device: torch.device) -> list[int]:
    """The blocks to leave out, ascending."""
    kept = list(range(source.num_blocks))
    head = _Head(source, sequences, device)
    start = source.embed(sequences).to(device)
    for _ in range(count):
        losses: dict[int, float] = {}
        states = _run(source, start, kept[:1], device)
        for place in range(1, len(kept) - 1):  # `states` have passed everything before it
            losses[kept[place]] = head.loss(_run(source, states, kept[place + 1 :], device))
            states = _run(source, states, [kept[place]], device)
        whole = head.loss(_run(source, states, kept[-1:], device))
        cheapest = min(losses, key=lambda index: losses[index])
        _log.info("block %d is dropped: the loss goes from %.4f to %.4f", cheapest, whole, losses[cheapest])
        kept.remove(cheapest)
    return [index for index in range(source.num_blocks) if index not in kept]


def _run(source: SourceModel, states: Tensor, indices: list[int], device: torch.device) -> Tensor:
    for index in indices:
        block = CalibratedBlock(source, index, None, device)
        states = torch.stack([block.forward(sequence, {}) for sequence in states])
    return states


class _HeadOps(CalibrationOps):
    def select_rows(self, x: Tensor) -> Tensor:
        return x


class _Head:
    """The loss of the next token behind the last block."""

    def __init__(self, source: SourceModel, sequences: Tensor, device: torch.device) -> None:
        self._decoder, self._targets = source.decoder, sequences.to(device)
        head = source.names[id(source.decoder.head)]
        weights = {source.final_norm: source.read_edge(FINAL_NORM).to(device), head: source.read(head).to(device)}
        self._ops = _HeadOps(source.names, weights, sequences.shape[1])

    def loss(self, states: Tensor) -> float:
        total = 0.0
        for sequence, targets in zip(states, self._targets, strict=True):
            logits = self._decoder.logits(self._ops, sequence[:-1])
            total += float(torch.nn.functional.cross_entropy(logits, targets[1:]))
        return total / len(states)
