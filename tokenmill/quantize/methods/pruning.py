"""What the pruning methods share: patterns of zeros, and the loop over a block's linears in the order of the forward
pass, so that each sees what its predecessors left.

"2:4" prunes two of every four neighbours in a row (any N:M works), "unstructured" a share of all weights.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.base import BlockView, Statistics, Transform

UNSTRUCTURED = "unstructured"


@dataclass(frozen=True, slots=True)
class Pattern:
    """`pruned` of `of` neighbours are zero; of = 0: a share of all, wherever they are."""

    pruned: int
    of: int
    share: float


def parse_pattern(step: str, text: str, share: float) -> Pattern:
    if not 0 < share < 1:
        raise UserError(f"{step}: a sparsity of {share:g} is not a share between 0 and 1", "give one such as 0.5")
    if text == UNSTRUCTURED:
        return Pattern(0, 0, share)
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or not 0 < int(match[1]) < int(match[2]) <= 64:
        raise UserError(f"{step}: '{text}' is not a pattern of zeros", f"give 2:4, 4:8 or {UNSTRUCTURED}")
    pruned, of = int(match[1]), int(match[2])
    return Pattern(pruned, of, pruned / of)


def least_of_neighbours(scores: Tensor, pattern: Pattern) -> Tensor:
    """bool like `scores` [rows, columns]: the `pruned` lowest of every `of` neighbours."""
    groups = scores.reshape(scores.shape[0], -1, pattern.of)
    lowest = groups.topk(pattern.pruned, dim=2, largest=False).indices
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(2, lowest, True).view(scores.shape)


def least_of_all(scores: Tensor, share: float) -> Tensor:
    """bool like `scores`: the lowest `share` of them; ties are broken by place, so that the number is exact."""
    flat = scores.flatten()
    order = torch.argsort(flat, stable=True)[: round(share * flat.numel())]
    return torch.zeros_like(flat, dtype=torch.bool).index_fill_(0, order, True).view(scores.shape)


class Pruner(Transform):
    """Subclasses say which statistics of a group's input they need, and prune one matrix by them."""

    makes_zeros = True
    tells_outputs = True
    kinds: ClassVar[tuple[str, ...]] = ()

    @dataclass(frozen=True, slots=True)
    class Options:
        pattern: str = "2:4"  # or another N:M, or "unstructured"
        sparsity: float = 0.5  # share of zeros, with pattern=unstructured

    @property
    def pattern(self) -> Pattern:
        return parse_pattern(self.name, self.options.pattern, self.options.sparsity)

    def scheme(self, scheme: Scheme) -> Scheme:
        pattern = self.pattern
        return replace(
            scheme, sparsity="2:4" if scheme.element == "float" and pattern.of == 4 == 2 * pattern.pruned else ""
        )

    def apply(self, block: BlockView, scheme_of: Mapping[str, Scheme]) -> None:
        pattern = self.pattern
        with torch.no_grad():
            for group in block.groups:
                names = [name for name in group.names if name in scheme_of]
                for name in names:
                    columns = block.weight(name).shape[1]
                    if pattern.of and columns % pattern.of:
                        raise UserError(
                            f"{name} has {columns} inputs, no multiple of {pattern.of}", f"use pattern={UNSTRUCTURED}"
                        )
                if names:
                    statistics = block.statistics(group, self.kinds) if self.kinds else None
                    pruned = self.prune({name: block.weight(name) for name in names}, statistics, pattern)
                    for name, weight in pruned.items():
                        block.replace(name, weight)

    @abstractmethod
    def prune(
        self, weights: Mapping[str, Tensor], statistics: Statistics | None, pattern: Pattern
    ) -> dict[str, Tensor]:
        """The matrices that read one input, pruned."""
