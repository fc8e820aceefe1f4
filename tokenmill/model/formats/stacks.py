"""The matrices of all experts of a layer: E matrices of one shape, each in any weight format.

An expert's matrix consists of blocks of rows that are weights of their own (gate, then up), so that files which keep
them apart, joined, interleaved or transposed are all read without a copy. `parts` gives them as tensors with a leading
axis of experts, for kernels that multiply many experts at once. Knows nothing of names of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.kernels.base import Choice, Declined
from tokenmill.model.formats.base import LinearWeight

if TYPE_CHECKING:
    from torch import Tensor


class JoinedRows(LinearWeight):
    """Weights with a common input as one matrix, first to last from the top."""

    def __init__(self, blocks: Sequence[LinearWeight]) -> None:
        self.blocks = tuple(blocks)
        first = self.blocks[0]
        self.format_name, self.type_name = first.format_name, first.type_name
        self.out_features, self.in_features = sum(b.out_features for b in blocks), first.in_features
        self.activations, self.input_scale = first.activations, first.input_scale
        biases = [block.bias for block in blocks if block.bias is not None]
        self.bias = _joined(biases) if biases else None

    def parts(self) -> dict[str, Tensor]:
        """Joined along rows; declines formats whose tensors do not have rows first."""
        return {role: _joined(tensors) for role, tensors in _same_parts(self.blocks).items()}

    def dequantize(self, begin: int, end: int) -> Tensor:
        rows, first = [], 0
        for block in self.blocks:
            low, high = max(begin - first, 0), min(end - first, block.out_features)
            if low < high:
                rows.append(block.dequantize(low, high))
            first += block.out_features
        return _joined(rows)

    def dequantize_rows(self, rows: Tensor) -> Tensor:
        return _joined([self.dequantize(row, row + 1) for row in rows.tolist()])


class WeightStack:
    """E matrices [out, in]; `experts[e]` are the blocks of rows of expert e."""

    def __init__(self, experts: Sequence[Sequence[LinearWeight]], first: int = 0) -> None:
        """`first`: the number of the first of them, where a rank has only some."""
        self.experts = tuple(tuple(blocks) for blocks in experts)
        self.first = first
        self.out_features = sum(block.out_features for block in self.experts[0])
        self.in_features = self.experts[0][0].in_features

    def __len__(self) -> int:
        return len(self.experts)

    def __getitem__(self, expert: int) -> LinearWeight:
        blocks = self.experts[expert]
        return blocks[0] if len(blocks) == 1 else JoinedRows(blocks)

    @property
    def type_name(self) -> str:
        return self.experts[0][0].type_name

    @property
    def bias(self) -> Tensor | None:
        """float32 [E, out], or None."""
        if self.experts[0][0].bias is None:
            return None
        import torch

        return torch.stack([_joined([b.bias for b in blocks if b.bias is not None]) for blocks in self.experts])

    def parts(self) -> dict[str, Tensor]:
        """The stored tensors by role, [E, out, ...]; declines formats whose tensors do not have rows first."""
        import torch

        joined = [{role: _joined(each) for role, each in _same_parts(blocks).items()} for blocks in self.experts]
        return {role: torch.stack([parts[role] for parts in joined]) for role in joined[0]}

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        """x @ W^T (+ bias) of one expert, by the kernels of its blocks."""
        blocks = self.experts[expert - self.first]
        outputs = [block.kernel.run(x) for block in blocks if block.kernel is not None]
        return outputs[0] if len(outputs) == 1 else _joined(outputs, -1)


@dataclass(slots=True, eq=False)
class ExpertStacks:
    gate_up: WeightStack  # [2 * width, hidden]: gate rows, then up rows
    down: WeightStack  # [hidden, width]
    kernel: Choice | None = None  # set by the loader: multiplies all experts at once; None: each has its own
    # How ranks share them: "" (each has all), "experts" (whole ones), "experts_in_order" (the same, and results are
    # added in the order of experts), or as LinearWeight.split of `down`
    split: str = ""
    shares: tuple[int, ...] = ()  # as in LinearWeight, of `down`

    @property
    def own(self) -> range:
        """The experts that this rank computes."""
        return range(self.gate_up.first, self.gate_up.first + len(self.gate_up))

    def blocks(self) -> list[LinearWeight]:
        """Every weight of every expert, expert by expert in the order of the products."""
        pairs = zip(self.gate_up.experts, self.down.experts, strict=True)
        return [block for inputs, outputs in pairs for block in (*inputs, *outputs)]


def _joined(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    import torch

    return torch.cat(list(tensors), axis)


def _same_parts(blocks: Sequence[LinearWeight]) -> dict[str, list[Tensor]]:
    every = [block.parts() for block in blocks]
    roles = every[0].keys()
    by_rows = all(
        part.dim() > 0 and part.shape[0] == b.out_features
        for b, p in zip(blocks, every, strict=True)
        for part in p.values()
    )
    if any(parts.keys() != roles for parts in every) or len({b.type_name for b in blocks}) > 1 or not by_rows:
        raise Declined(f"experts of type {blocks[0].type_name} cannot be stacked")
    return {role: [parts[role] for parts in every] for role in roles}
