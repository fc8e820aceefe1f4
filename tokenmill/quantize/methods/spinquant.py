"""SpinQuant: the rotations of rotation.py, learned instead of random. Still folded into the weights.

The residual rotation R1 and each block's head rotation R2 are orthogonal matrices, R = R0 (I - A)^-1 (I + A) with A
skew (Cayley), and A is learned by Adam. What is minimized is the error that GPTQ will leave, without rounding anything:
with D the pivots of H = E[x x^T] (what of a column its successors cannot make good) a group of columns with step s
costs s^2 / 12 times the sum of its pivots, and s is the group's largest weight over 2^(bits - 1). The product of the
pivots does not depend on a rotation, so a good rotation makes groups with large pivots those with small weights.
Relative to what each linear puts out, summed over all linears.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from tokenmill.kernels.hadamard import signed_hadamard
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.base import BlockView, ModelView, Statistics
from tokenmill.quantize.methods.rotation import Rotation, Turn, refuse_normed_updates

_RIDGE = 0.01  # of the mean diagonal: gptq's own damping


@dataclass(slots=True, eq=False)
class _Linears:
    """Linears that read one input, with everything their error depends on. `reads`, `writes`: "residual", "heads" or
    nothing, by what is rotated."""

    weights: list[Tensor]  # norms folded in
    schemes: list[Scheme]
    hessian: Tensor
    reads: str
    writes: list[str]
    energy: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hessian.diagonal().add_(_RIDGE * self.hessian.diagonal().mean() + 1e-12)
        self.energy = [float(((w @ self.hessian) * w).sum().clamp(min=1e-20)) for w in self.weights]

    def loss(self, residual: Tensor, heads: Tensor) -> Tensor:
        """`residual` [hidden, hidden] and `heads` [head_dim, head_dim]: R^T each, so that inputs turn by W R^T."""
        hessian = self.hessian
        total = torch.zeros((), device=hessian.device)
        if self.reads == "residual":
            hessian = residual.T @ hessian @ residual
        elif self.reads == "heads":
            hessian = _heads(_heads(hessian, heads).T, heads)
        # From the last column up, as gptq compensates: later columns make good what earlier ones lose.
        pivots = torch.linalg.cholesky(hessian.flip(0, 1)).diagonal().flip(0).square()
        for weight, scheme, energy, writes in zip(self.weights, self.schemes, self.energy, self.writes, strict=True):
            if self.reads == "residual":
                weight = weight @ residual
            elif self.reads == "heads":
                weight = _heads(weight, heads)
            if writes == "residual":
                weight = residual.T @ weight
            elif writes == "heads":
                weight = _heads(weight.T, heads).T
            group = scheme.group_size or weight.shape[1]
            groups = weight.unflatten(1, (-1, group))
            spread = 2 * groups.abs().amax(2) if scheme.symmetric else groups.amax(2) - groups.amin(2)
            steps = (spread / (2.0**scheme.bits - 1)).square().sum(0)
            total = total + (steps * pivots.view(-1, group).sum(1)).sum() / (12 * energy)
        return total


def _heads(rows: Tensor, turn: Tensor) -> Tensor:
    """Columns of [out, heads * head_dim], each head turned."""
    return (rows.unflatten(1, (-1, turn.shape[0])) @ turn).flatten(1)


class _Cayley:
    """An orthogonal matrix that can be learned: `start` times the Cayley transform of a skew matrix."""

    def __init__(self, start: Tensor) -> None:
        self.start = start
        self.free = torch.zeros_like(start, requires_grad=True)

    def matrix(self) -> Tensor:
        skew = self.free.triu(1)
        skew = skew - skew.T
        identity = torch.eye(skew.shape[0], device=skew.device)
        return self.start @ torch.linalg.solve(identity - skew, identity + skew)


class SpinQuant(Rotation):
    name = "spinquant"
    needs_calibration = True

    @dataclass(frozen=True, slots=True)
    class Options(Rotation.Options):
        steps: int = 60
        rate: float = 0.004
        hadamard: bool = True  # start from a random Hadamard matrix, else from no rotation

    def residual_turn(self) -> Turn:
        return partial(_turned, matrix=self._learned["residual"])

    def head_turn(self, index: int) -> Turn:
        return partial(_turned, matrix=self._learned[f"heads.{index}"])

    def begin(self, model: ModelView) -> None:
        if self.options.residual:
            refuse_normed_updates(model.description)
        self._learned = model.remember(self.name, partial(self._learn, model))
        super().begin(model)

    def _learn(self, model: ModelView) -> dict[str, Tensor]:
        """R1^T and every R2^T, float32."""
        schemes, blocks = model.scheme_of(), []
        for block, statistics in model.survey(("hessian",)):
            blocks.append(_collect(block, statistics, schemes))
            head_dim, device = block.head_dim, block.weight(block.groups[0].names[0]).device
        hidden = model.description.hidden_size
        seed = self.options.seed
        residual = _Cayley(self._start(hidden, seed).to(device))
        heads = [_Cayley(self._start(head_dim, seed + 1 + index).to(device)) for index in range(len(blocks))]
        free = [residual.free] * self.options.residual + [each.free for each in heads] * self.options.heads
        optimizer = torch.optim.Adam(free, lr=self.options.rate, betas=(0.9, 0.99))
        best, kept = math.inf, None
        for step in range(self.options.steps + 1):
            for settings in optimizer.param_groups:
                settings["lr"] = self.options.rate * 0.5 * (1 + math.cos(math.pi * step / self.options.steps))
            optimizer.zero_grad()
            total = 0.0
            # Block by block: what autograd keeps is then one block's. R1 is made once, its gradient collected.
            turn = residual.matrix()
            detached = turn.detach().requires_grad_()
            for linears, head in zip(blocks, heads, strict=True):
                if not linears:  # all of the block's are left out
                    continue
                turned = head.matrix()
                loss = torch.stack([each.loss(detached, turned) for each in linears]).sum()
                loss.backward()
                total += float(loss.detach())
            if self.options.residual and detached.grad is not None:
                turn.backward(detached.grad)
            if total < best:
                best = total
                kept = {"residual": turn.detach().clone()}
                kept |= {f"heads.{index}": each.matrix().detach().clone() for index, each in enumerate(heads)}
            optimizer.step()
        assert kept is not None
        return {name: _orthogonal(matrix).cpu() for name, matrix in kept.items()}

    def _start(self, size: int, seed: int) -> Tensor:
        identity = torch.eye(size, dtype=torch.float64)
        return (signed_hadamard(identity, seed) if self.options.hadamard else identity).float()


def _turned(rows: Tensor, matrix: Tensor) -> Tensor:
    return rows @ matrix.to(rows)


def _orthogonal(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix: what learning in float32 left of it, to the last bits."""
    u, _, v = torch.linalg.svd(matrix.double())
    return (u @ v).contiguous()


def _collect(block: BlockView, statistics: Mapping[str, Statistics], schemes: Mapping[str, Scheme]) -> list[_Linears]:
    """The block's linears with their norms folded in, and the moments of their inputs."""
    values = {group.source for group in block.groups if group.source and group.source.endswith("v_proj")}
    found = []
    for group in block.groups:
        names = [name for name in group.names if name in schemes]
        if not names:
            continue
        hessian = statistics[names[0]].hessian
        assert hessian is not None
        weights = [block.weight(name) for name in names]
        reads = "heads" if group.source in values else ""
        writes = ["heads" if name in values else "" for name in names]
        if group.source_is_norm and group.source is not None:
            norm = block.weight(group.source)
            weights = [weight * norm for weight in weights]
            inverse = 1 / torch.where(norm.abs() < 1e-6, torch.full_like(norm, 1e-6), norm)
            hessian, reads = hessian * inverse * inverse.unsqueeze(1), "residual"
        else:
            writes = ["residual"] * len(names)
        found.append(_Linears(weights, [schemes[name] for name in names], hessian, reads, writes))
    return found
