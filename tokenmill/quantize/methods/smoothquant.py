"""SmoothQuant: where activations are rounded too, their large channels are scaled down and the weights scaled up.

The strength alpha (all on the activations 1, all on the weights 0) is fixed, or found per group of linears by rounding
a sample of inputs and the weights for each of a few alphas; from the best one, a descent gives each channel a scale of
its own. Scales fold into the norm or the linear before, so the file is a plain one. A solver (rtn, gptq) rounds the
weights afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.base import SAMPLE_ROWS, BlockView, LinearGroup, Transform
from tokenmill.quantize.methods.awq import fold_scale, narrow, widen
from tokenmill.quantize.methods.rtn import round_to_nearest

SEARCHED_ALPHAS = tuple(step / 10 for step in range(3, 10))
_SMALLEST = 1e-5
_SEARCH_ROWS = 512  # of the sample, on which strengths are compared
_REFINE_RATE = 0.02  # of the logarithm of a scale, at the first step


class SmoothQuant(Transform):
    name = "smoothquant"
    needs_calibration = True

    @dataclass(frozen=True, slots=True)
    class Options:
        alpha: float = 0.5  # used where `search` is off
        search: bool = True  # the alpha of least output error per group, none at all included
        values: bool = True  # also smooth what enters o_proj, through v_proj
        products: bool = True  # also smooth what enters down_proj, through up_proj
        steps: int = 100  # of descent from the searched scale on the noise of integer grids; 0: none

    def memory_bytes(self, shape: tuple[int, int]) -> int:
        """The sample, its squares and a product of them; the weights twice, and rounded."""
        return 4 * shape[1] * (3 * SAMPLE_ROWS + 3 * shape[0])

    def apply(self, block: BlockView, scheme_of: Mapping[str, Scheme]) -> None:
        if not 0.0 <= self.options.alpha <= 1.0:
            raise UserError(f"smoothquant: alpha is {self.options.alpha}", "give a share between 0 and 1")
        for group in block.groups:
            names = [name for name in group.names if name in scheme_of]
            if names and self._smooths(group):
                self._smooth(block, group, {name: scheme_of[name] for name in names})

    def _smooths(self, group: LinearGroup) -> bool:
        if group.source is None or group.source_is_norm:
            return group.source is not None
        return self.options.values if group.source.endswith("v_proj") else self.options.products

    @torch.no_grad()
    def _smooth(self, block: BlockView, group: LinearGroup, schemes: Mapping[str, Scheme]) -> None:
        statistics = block.statistics(group, ("max_abs", "sample"))
        assert statistics.max_abs is not None
        assert statistics.sample is not None
        repeats, head_dim = group.source_repeats, block.head_dim
        weights = [block.weight(name) for name in schemes]
        sizes = narrow(torch.stack([weight.abs().amax(0) for weight in weights]).amax(0), repeats, head_dim)
        if not self.options.search:
            largest = narrow(statistics.max_abs, repeats, head_dim)
            fold_scale(block, group, smoothing_scale(largest, sizes, self.options.alpha))
            return
        wide, sample = partial(widen, repeats=repeats, head_dim=head_dim), statistics.sample
        candidates = [torch.ones_like(sizes)]
        for peaks in (statistics.max_abs, largest_share(sample)):
            largest = narrow(peaks, repeats, head_dim)
            candidates += [smoothing_scale(largest, sizes, alpha) for alpha in SEARCHED_ALPHAS]
        search_rows, kinds = sample[:: max(1, len(sample) // _SEARCH_ROWS)], list(schemes.values())
        errors = rounding_errors(search_rows, weights, kinds, [wide(scale) for scale in candidates])
        best = candidates[min(range(len(errors)), key=errors.__getitem__)]
        if self.options.steps and all(_rounds_alike(scheme) for scheme in kinds):
            refined = refine(best, sample, weights, self.options.steps, wide)
            if rounding_errors(search_rows, weights, kinds, [wide(refined)])[0] < min(errors):
                best = refined
        fold_scale(block, group, best)


def _rounds_alike(scheme: Scheme) -> bool:
    """Whether weights and activations are both int8 with one scale per row and token, as `refine` assumes."""
    return (scheme.bits, scheme.group_size, scheme.activations) == (8, 0, "int8_token")


def largest_share(sample: Tensor) -> Tensor:
    """[in]: the largest share of each channel in any token of `sample` [n, in], relative to the token's size. Every
    token has a scale of its own, so a token that is large as a whole does no harm to the others."""
    return (sample.abs() / sample.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-12)).amax(0)


def smoothing_scale(largest: Tensor, sizes: Tensor, alpha: float) -> Tensor:
    """max|x|^alpha / max|w|^(1 - alpha) per channel: the divisor of inputs and multiplier of weights."""
    scale = largest.clamp(min=_SMALLEST) ** alpha / sizes.clamp(min=_SMALLEST) ** (1 - alpha)
    return scale.clamp(min=_SMALLEST)


def refine(
    scale: Tensor, sample: Tensor, weights: Sequence[Tensor], steps: int, widened: Callable[[Tensor], Tensor]
) -> Tensor:
    """`scale`, moved to where rounding both sides to a grid that spans each token and each row makes the least noise.

    A grid's noise is a share of the square of its span. With x the inputs, s the scale, p a token's product:
    mean over tokens of max_j(x_j / s_j)^2 / |p|^2 times sum_j s_j^2 |w_j|^2, and the same with the sides exchanged.
    `widened` expands a scale of the source's channels to one of inputs.
    """
    inputs = sample.square()
    sides = []  # of each weight: its squares, |w_j|^2, 1 / |p|^2 of each token, mean of x_j^2 / |p|^2
    for weight in weights:
        share = 1.0 / (sample @ weight.T).square().sum(-1).clamp(min=1e-30)
        sides.append((weight.square(), weight.square().sum(0), share, (inputs * share.unsqueeze(1)).mean(0)))
    with torch.enable_grad():
        logarithm = scale.log().requires_grad_()
        optimizer = torch.optim.Adam([logarithm])
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = _REFINE_RATE * (1 - step / steps)
            wide = widened(logarithm).mul(2).exp()  # s^2
            noise, spans = logarithm.new_zeros(()), largest_products(inputs, 1 / wide)
            for squares, column, share, mean in sides:
                noise = noise + (spans * share).mean() * (wide * column).sum()
                noise = noise + (mean / wide).sum() * largest_products(squares, wide).sum()
            optimizer.zero_grad()
            noise.log().backward()
            optimizer.step()
    return logarithm.detach().exp()


def largest_products(rows: Tensor, scale: Tensor) -> Tensor:
    """The largest of rows [n, in] * scale [in] in each row; differentiable in `scale` without a pass over `rows`."""
    indices = (rows * scale.detach()).argmax(-1)
    return rows.gather(1, indices.unsqueeze(1)).squeeze(1) * scale[indices]


def rounding_errors(
    sample: Tensor, weights: Sequence[Tensor], schemes: Sequence[Scheme], scales: Sequence[Tensor]
) -> list[float]:
    """For each scale: the squared error of the products of `sample` [n, in], both sides rounded, as a share of each
    token's product; the mean over tokens, summed over the weights."""
    totals = [0.0] * len(scales)
    for weight, scheme in zip(weights, schemes, strict=True):
        expected = sample @ weight.T
        power = expected.square().sum(-1).clamp(min=1e-30)
        for index, scale in enumerate(scales):
            rounded = round_activations(sample / scale, scheme.activations)
            actual = rounded @ round_to_nearest(weight * scale, scheme).dequantize().T
            totals[index] += float(((actual - expected).square().sum(-1) / power).mean())
    return totals


def round_activations(x: Tensor, kind: str) -> Tensor:
    """The input [n, in] of a product, rounded as a scheme's `activations` says, one scale per token."""
    if kind == "int8_token":
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127.0
        return (x / scale).round() * scale
    if kind == "fp8_token":
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
        return (x / scale).to(torch.float8_e4m3fn).float() * scale
    return x
