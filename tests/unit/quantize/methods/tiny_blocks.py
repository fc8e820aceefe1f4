"""Real blocks of tiny random models with calibration data at their door, for the tests of calibrated methods."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tests.parity.tiny_models import make
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.quantize.calibrate import CalibratedBlock, HiddenStates
from tokenmill.quantize.edges import Edges
from tokenmill.quantize.source import SourceModel

LENGTH = 24
_HOST = torch.device("cpu")


class TinyModel:
    """A model saved by transformers, opened as a job opens it. `ids` [12, LENGTH] are the calibration tokens."""

    def __init__(self, name: str, folder: Path) -> None:
        self.oracle = make(name, folder)
        self.source = SourceModel(open_checkpoint(folder), LENGTH)
        self.edges = Edges(self.source)
        self.ids = torch.randint(3, 131, (12, LENGTH), generator=torch.Generator().manual_seed(7))

    def block(self, index: int = 0, device: torch.device = _HOST) -> CalibratedBlock:
        """Block `index` with the embedding's rows, an outlier channel among them, at its door."""
        states = self.source.embed(self.ids).clone()
        states[..., 5] *= 6.0
        return CalibratedBlock(self.source, index, HiddenStates(states, batch=6), device)

    def logits(self, blocks: list[CalibratedBlock]) -> Tensor:
        """The whole model's logits for `ids`, with the blocks and edges as they are now."""
        states = self.edges.embed(self.ids)
        for block in blocks:
            states = torch.stack([block.forward(sequence, {}) for sequence in states])
        eps = self.edges.description.norm_eps
        normed = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps) * self.edges.weight("model.norm")
        return normed @ self.edges.weight("lm_head").T


def outputs(block: CalibratedBlock) -> Tensor:
    """What the block makes of its calibration data with its weights as they are now."""
    with torch.no_grad():
        return torch.stack([block.forward(sequence, {}) for sequence in block.inputs()])


def output_loss(block: CalibratedBlock, expected: Tensor) -> float:
    return float((outputs(block) - expected).square().mean())
