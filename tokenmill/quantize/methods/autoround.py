"""AutoRound: learns for each weight whether to round up or down, and for each group how far to clip, by signed gradient
descent on the error of the block's output.

Rounding passes gradients straight through. Each step rounds the weights once, runs a few sequences through the block
and moves every parameter by the same small amount against the sign of its gradient; the best step is kept. Objective
"layer" descends on each linear's own output error instead, from the Hessian alone: cheaper, but ignores later layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenmill.errors import UserError, unknown_name
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.quantize.base import BlockView, ModelView, Solver
from tokenmill.quantize.fisher import FISHER_PASSES, FISHER_SEQUENCES
from tokenmill.quantize.methods.compensation import gptq_starts
from tokenmill.quantize.methods.rtn import check_integer_scheme, range_grid

OBJECTIVES = ("block", "layer")
TARGETS = ("float", "block")
METRICS = ("plain", "fisher")
STARTS = ("rtn", "gptq")
_LEAST_RANGE = 0.5  # ranges shrink to no less than this share


class LearnedRounding:
    """One matrix and its parameters: an offset in [-0.5, 0.5] per weight, and the share of the range kept per group.

    Everything is kept as [out, groups, group]. Gradients are written out instead of traced: a step is then a few passes
    over the weights, which matters where there are few cores.
    """

    def __init__(
        self,
        weight: Tensor,
        scheme: Scheme,
        learns_range: bool,
        full_range: bool = False,
        grid: QuantizedMatrix | None = None,
    ) -> None:
        """`full_range`: see range_grid. `grid`: whose scales and zeros to begin with, not those of the weights."""
        self.shape, self.scheme, self.learns_range = weight.shape, scheme, learns_range
        self._full_range = full_range and scheme.symmetric
        self.weight = weight.reshape(weight.shape[0], -1, scheme.group_size or weight.shape[1])
        self.low, self.high = self._ranges(grid)
        self.offset = torch.zeros_like(self.weight)
        self.low_share, self.high_share = torch.ones_like(self.low), torch.ones_like(self.high)
        self.codes, self.scales, self.zeros, self.inside = self._round()
        self.best = self._copies()

    def dequantize(self) -> Tensor:
        """The weights [out, in] as the present parameters round them."""
        self.codes, self.scales, self.zeros, self.inside = self._round()
        return ((self.codes - self.zeros) * self.scales).view(self.shape)

    def step(self, slopes: Tensor, rate: float) -> None:
        """Move against the sign of the gradients, given the loss's gradient by what `dequantize` returned."""
        slopes = slopes.reshape(self.weight.shape)
        by_low, by_high = self._range_gradients(slopes) if self.learns_range else (None, None)
        towards = slopes * self.inside
        if self._full_range:
            towards *= self.scales.sign()
        self.offset.sub_(towards.sign_(), alpha=rate).clamp_(-0.5, 0.5)
        if by_low is not None and by_high is not None:
            self.low_share.sub_(by_low.sign(), alpha=rate).clamp_(_LEAST_RANGE, 1.0)
            self.high_share.sub_(by_high.sign(), alpha=rate).clamp_(_LEAST_RANGE, 1.0)

    def keep(self) -> None:
        """Keep the current parameters as the best so far."""
        self.best = self._copies()

    def finish(self) -> QuantizedMatrix:
        """The matrix of the best parameters."""
        self.offset, self.low_share, self.high_share = self.best
        codes, scales, zeros, _ = self._round()
        return QuantizedMatrix(
            self.scheme,
            codes.to(torch.uint8).view(self.shape),
            scales.squeeze(-1),
            None if self.scheme.symmetric else zeros.squeeze(-1),
        )

    def _ranges(self, grid: QuantizedMatrix | None) -> tuple[Tensor, Tensor]:
        """(low, high) [out, groups, 1] of the weights, or those of which `grid` is the grid."""
        if grid is None:
            return self.weight.amin(-1, keepdim=True).clamp(max=0.0), self.weight.amax(-1, keepdim=True).clamp(min=0.0)
        levels, scales = 2.0**self.scheme.bits - 1, grid.scales.unsqueeze(-1)
        if grid.zeros is not None:
            zeros = grid.zeros.unsqueeze(-1)
            return -zeros * scales, (levels - zeros) * scales
        span = scales * ((levels + self._full_range) / 2)
        if not self._full_range:
            return torch.zeros_like(span), span
        return -span.clamp(min=0.0), -span.clamp(max=0.0)

    def _round(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(codes, scales, zeros, which codes were not clamped)."""
        scales, zeros = self._grid()
        codes = (self.weight / scales).add_(zeros).add_(self.offset).round_()
        levels = 2**self.scheme.bits - 1
        inside = (codes >= 0) & (codes <= levels)
        return codes.clamp_(0, levels), scales, zeros, inside

    def _grid(self) -> tuple[Tensor, Tensor]:
        """(scales, zeros) [out, groups, 1]: those of round-to-nearest while the shares are 1."""
        low, high = self.low * self.low_share, self.high * self.high_share
        scales, zeros = range_grid(low, high, self.scheme, self._full_range)
        return scales, torch.full_like(scales, 2.0 ** (self.scheme.bits - 1)) if zeros is None else zeros

    def _range_gradients(self, slopes: Tensor) -> tuple[Tensor, Tensor]:
        """Of the shares of low and high, roundings passed straight through.

        value = scale * (code - zero), code = weight / scale + zero + offset: by the scale it is code - zero, less
        weight / scale where not clamped; by the zero it is nothing, or -scale where clamped.
        """
        levels = 2.0**self.scheme.bits - 1
        moved = (self.codes - self.zeros).sub_((self.weight / self.scales).mul_(self.inside))
        by_scale = (slopes * moved).sum(-1, keepdim=True)
        if self.scheme.symmetric:
            low, high = -self.low * self.low_share, self.high * self.high_share
            factor: float | Tensor = 2.0 / levels
            if self._full_range:
                factor = self.scales.sign() / 2.0 ** (self.scheme.bits - 1)
            return by_scale * (low > high) * -self.low * factor, by_scale * (high >= low) * self.high * factor
        by_zero = -(slopes * ~self.inside).sum(-1, keepdim=True) * self.scales
        by_scale = by_scale + by_zero * self.low * self.low_share / self.scales.square()  # zero = -low / scale
        by_low = by_scale * -self.low / levels - by_zero * self.low / self.scales
        return by_low, by_scale * self.high / levels

    def _copies(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.offset.clone(), self.low_share.clone(), self.high_share.clone()


Gradients = Callable[[int, Mapping[str, Tensor]], tuple[float, Mapping[str, Tensor]]]


def descend(roundings: Mapping[str, LearnedRounding], gradients: Gradients, iterations: int, rate: float) -> None:
    """Signed descent, the rate falling linearly to zero. `gradients(iteration, weights)` gives the loss, comparable
    between iterations, and its gradient by each weight."""
    least_loss = float("inf")
    for iteration in range(iterations):
        loss, slopes = gradients(iteration, {name: rounding.dequantize() for name, rounding in roundings.items()})
        if loss < least_loss:
            least_loss = loss
            for rounding in roundings.values():
                rounding.keep()
        for name, rounding in roundings.items():
            rounding.step(slopes[name], rate * (1 - iteration / iterations))


class BlockObjective:
    """Mean squared change of the block's output on a batch of sequences, as a share of what the first rounding does to
    the same sequences: so losses of different batches can be compared."""

    def __init__(
        self,
        block: BlockView,
        plain: Mapping[str, Tensor],
        sequences: Sequence[Tensor],
        batch: int,
        targets: Sequence[Tensor] | None = None,
        root: Tensor | None = None,
    ) -> None:
        """`targets`: what the block should put out; None: what its float weights make of the same inputs. `root`: by
        which changes of the output are multiplied before they are squared."""
        self._block, self._sequences, self._root = block, sequences, root
        self._batch = min(batch, len(sequences))
        self._generator = torch.Generator().manual_seed(block.index)
        with torch.no_grad():
            self._targets = list(targets or (block.forward(sequence, {}) for sequence in sequences))
            self._plain = [
                float(self._squared(block.forward(sequence, plain) - target).clamp(min=1e-30))
                for sequence, target in zip(sequences, self._targets, strict=True)
            ]

    def __call__(self, iteration: int, weights: Mapping[str, Tensor]) -> tuple[float, Mapping[str, Tensor]]:
        del iteration
        chosen = torch.randperm(len(self._sequences), generator=self._generator, device="cpu")[: self._batch].tolist()
        leaves = {name: weight.requires_grad_() for name, weight in weights.items()}
        output = self._block.forward(torch.stack([self._sequences[index] for index in chosen]), leaves)
        target = torch.stack([self._targets[index] for index in chosen])
        loss = self._squared(output - target) / sum(self._plain[index] for index in chosen)
        loss.backward()
        return float(loss.detach()), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    def _squared(self, change: Tensor) -> Tensor:
        return (change if self._root is None else change @ self._root).square().sum()


def layer_gradients(float_weights: Mapping[str, Tensor], hessian: Tensor) -> Gradients:
    """The output error tr(D H D^T) of linears that share one input, and its gradient 2 D H."""

    def gradients(_iteration: int, weights: Mapping[str, Tensor]) -> tuple[float, Mapping[str, Tensor]]:
        total, slopes = 0.0, {}
        for name, weight in weights.items():
            delta = weight - float_weights[name]
            slopes[name] = delta @ hessian
            total += float((slopes[name] * delta).sum())
        return total, slopes

    return gradients


class AutoRound(Solver):
    name = "autoround"
    needs_calibration = True

    @dataclass(frozen=True, slots=True)
    class Options:
        iterations: int = 200
        rate: float = 0.0  # of the first step; 0: 1 / iterations
        objective: str = "block"  # or "layer"
        sequences: int = 8  # run through the block in each step
        pool: int = 64  # calibration sequences that steps draw from, evenly spaced
        tokens: int = 256  # of each sequence, its first; more cost in proportion
        learn_range: bool = True
        full_range: bool = True  # of symmetric grids: the extreme weight of a group is stored exactly
        start: str = "rtn"  # what descent begins with: plain rounding, or "gptq", from which fewer steps do
        target: str = "float"  # the float model's own output, so that a block mends what earlier ones lost; or "block"
        metric: str = "plain"  # of the output's error; "fisher": its directions by what they cost the model's answers

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self.needs_targets = self.options.objective == "block" and self.options.target == "float"
        self.needs_states = self.options.metric == "fisher"
        self._roots: Mapping[str, Tensor] = {}  # by block

    def begin(self, model: ModelView) -> None:
        if self.needs_states:
            self._roots = model.remember(
                self.name, lambda: {str(index): root for index, root in enumerate(model.output_roots())}
            )

    def check(self, name: str, shape: tuple[int, int], scheme: Scheme) -> None:
        check_integer_scheme(self.name, name, shape, scheme)
        o = self.options
        if o.objective not in OBJECTIVES:
            raise unknown_name("objective of autoround", o.objective, OBJECTIVES)
        if o.target not in TARGETS:
            raise unknown_name("target of autoround", o.target, TARGETS)
        if o.start not in STARTS:
            raise unknown_name("start of autoround", o.start, STARTS)
        if o.metric not in METRICS:
            raise unknown_name("metric of autoround", o.metric, METRICS)
        for given in (f"start={o.start}", f"metric={o.metric}"):
            if given in ("start=gptq", "metric=fisher") and o.objective == "layer":
                raise UserError(f"autoround: {given} goes with objective=block", "leave one of the two options out")
        if min(o.iterations, o.sequences, o.pool, o.tokens) < 1 or o.rate < 0:
            raise UserError("autoround: an option is below its minimum", "give counts from 1 and a rate from 0")

    def memory_bytes(self, shape: tuple[int, int]) -> int:
        """Start, parameters, their best, codes and gradients of a matrix; a whole block is learned at once."""
        return 4 * 11 * shape[0] * shape[1] * (3 if self.options.objective == "block" else 1) + 4 * shape[1] ** 2

    def operations(self, num_weights: int, length: int) -> float:
        """A pass down and two back for each step's tokens, a third more for what are no products, and some forty passes
        over the weights themselves, each of which takes the time of about as many products."""
        o = self.options
        tokens = o.sequences * min(o.tokens, length) if o.objective == "block" else 0
        roots = FISHER_PASSES * FISHER_SEQUENCES * length * 2.0 * num_weights if self.needs_states else 0.0
        return o.iterations * num_weights * (8.0 * tokens + 1500.0) + roots

    def solve(self, block: BlockView, scheme_of: Mapping[str, Scheme]) -> dict[str, QuantizedMatrix]:
        matrices = (self._solve_block if self.options.objective == "block" else self._solve_layers)(block, scheme_of)
        for name, matrix in matrices.items():
            block.replace(name, matrix.dequantize())
        return matrices

    def _solve_block(self, block: BlockView, scheme_of: Mapping[str, Scheme]) -> dict[str, QuantizedMatrix]:
        if self.options.start == "gptq":
            roundings = self._compensated(block, scheme_of)
        else:
            roundings = self._roundings(block, scheme_of, scheme_of)
        plain = {name: rounding.dequantize() for name, rounding in roundings.items()}
        targets = block.targets() if self.needs_targets else None
        root = self._roots.get(str(block.index))
        objective = BlockObjective(
            block,
            plain,
            self._sequences(block.inputs()),
            self.options.sequences,
            None if targets is None else self._sequences(targets),
            None if root is None else root.to(next(iter(plain.values())).device),
        )
        self._descend(roundings, objective)
        return {name: rounding.finish() for name, rounding in roundings.items()}

    def _solve_layers(self, block: BlockView, scheme_of: Mapping[str, Scheme]) -> dict[str, QuantizedMatrix]:
        matrices: dict[str, QuantizedMatrix] = {}
        for group in block.groups:
            names = [name for name in group.names if name in scheme_of]
            if not names:
                continue
            hessian = block.statistics(group, ("hessian",)).hessian
            assert hessian is not None
            roundings = self._roundings(block, names, scheme_of)
            self._descend(roundings, layer_gradients({name: block.weight(name) for name in names}, hessian))
            for name, rounding in roundings.items():
                matrices[name] = rounding.finish()
                block.replace(name, matrices[name].dequantize())
        return matrices

    def _roundings(
        self, block: BlockView, names: Iterable[str], scheme_of: Mapping[str, Scheme]
    ) -> dict[str, LearnedRounding]:
        o = self.options
        return {
            name: LearnedRounding(block.weight(name), scheme_of[name], o.learn_range, o.full_range) for name in names
        }

    def _compensated(self, block: BlockView, scheme_of: Mapping[str, Scheme]) -> dict[str, LearnedRounding]:
        o = self.options
        return {
            name: LearnedRounding(start.weight, scheme_of[name], o.learn_range, o.full_range, start.matrix)
            for name, start in gptq_starts(block, scheme_of, o.full_range).items()
        }

    def _descend(self, roundings: Mapping[str, LearnedRounding], gradients: Gradients) -> None:
        descend(roundings, gradients, self.options.iterations, self.options.rate or 1 / self.options.iterations)

    def _sequences(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        count = min(self.options.pool, len(inputs))
        return [inputs[index * len(inputs) // count][: self.options.tokens] for index in range(count)]
