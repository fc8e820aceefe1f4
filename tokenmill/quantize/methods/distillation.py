"""Trains parameters of one block so that its output is that of the unquantized block: the loop of qat. Adam under a
cosine; every eighth sequence is held out, and the parameters that did best on those are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.quantize.base import BlockView

_HELD_OUT = 8  # one sequence in so many
_CHECKS = 10  # times that the held-out sequences are measured


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """A base of the Options of a method that trains."""

    steps: int = 200
    sequences: int = 4  # in each step
    tokens: int = 128  # of each sequence, its first
    rate: float = 0.01  # of the first step, for weights in units of their step; others follow from it


def check_training(step: str, options: TrainingOptions) -> None:
    if min(options.steps, options.sequences, options.tokens) < 1 or options.rate <= 0:
        raise UserError(f"{step}: an option is below its minimum", "give counts from 1 and a rate above 0")


def train_block(
    block: BlockView,
    parameters: Sequence[tuple[Sequence[Tensor], float]],
    weights: Callable[[], Mapping[str, Tensor]],
    options: TrainingOptions,
) -> float:
    """Descend on the parameters, given in groups with the share of the rate that each gets; `weights` makes of them
    what the block runs with. Leaves the best in place and returns the loss that is left, as a share of the first.

    The target is what the float model puts out here, where the job runs it beside, so that a block also mends what
    earlier ones lost; else what the float weights make of the same input."""
    inputs, beside = block.inputs(), block.targets()
    sequences = [inputs[index][: options.tokens] for index in range(len(inputs))]
    with torch.no_grad():
        if beside is None:
            targets = [block.forward(sequence, {}) for sequence in sequences]
        else:
            targets = [beside[index][: options.tokens] for index in range(len(inputs))]
    held = list(range(0, len(sequences), _HELD_OUT))
    pool = [index for index in range(len(sequences)) if index not in held] or held
    generator = torch.Generator().manual_seed(block.index)
    groups = [{"params": list(each), "lr": options.rate * share, "share": share} for each, share in parameters]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
    flat = [each for group, _ in parameters for each in group]

    def loss(chosen: Sequence[int], present: Mapping[str, Tensor]) -> Tensor:
        output = block.forward(torch.stack([sequences[index] for index in chosen]), present)
        return (output - torch.stack([targets[index] for index in chosen])).square().mean()

    def held_loss() -> float:
        with torch.no_grad():
            return float(loss(held, weights()))

    first = best = held_loss()
    kept = [each.detach().clone() for each in flat]
    every = max(1, options.steps // _CHECKS)
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.rate * group["share"] * 0.5 * (1 + math.cos(math.pi * step / options.steps))
        order = torch.randperm(len(pool), generator=generator, device="cpu")
        chosen = [pool[each] for each in order[: options.sequences].tolist()]
        optimizer.zero_grad()
        loss(chosen, weights()).backward()
        optimizer.step()
        if (step + 1) % every == 0 or step + 1 == options.steps:
            found = held_loss()
            if found < best:
                best, kept = found, [each.detach().clone() for each in flat]
    with torch.no_grad():
        for each, value in zip(flat, kept, strict=True):
            each.copy_(value)
    return best / max(first, 1e-30)
