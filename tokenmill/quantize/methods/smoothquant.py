"""SmoothQuant: where activations are rounded too, their large channels are scaled down and the weights scaled up.

The strength alpha (all on the activations 1, all on the weights 0) is fixed, or found per group of linears by rounding
a sample of inputs and the weights for each of a few alphas. Scales fold into the norm or the linear before, so the file
is a plain one. A solver (rtn, gptq) rounds the weights afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.base import BlockView, LinearGroup, Transform
from tokenmill.quantize.methods.awq import fold_scale, narrow, widen
from tokenmill.quantize.methods.rtn import round_to_nearest

SEARCHED_ALPHAS = tuple(step / 10 for step in range(3, 10))
_SMALLEST = 1e-5


class SmoothQuant(Transform):
    name = "smoothquant"
    needs_calibration = True

    @dataclass(frozen=True, slots=True)
    class Options:
        alpha: float = 0.5  # used where `search` is off
        search: bool = True  # the alpha of least output error per group, none at all included
        values: bool = True  # also smooth what enters o_proj, through v_proj
        products: bool = True  # also smooth what enters down_proj, through up_proj

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
        candidates = [torch.ones_like(sizes)]
        for seen in (statistics.max_abs, largest_share(statistics.sample)):
            largest = narrow(seen, repeats, head_dim)
            candidates += [smoothing_scale(largest, sizes, alpha) for alpha in SEARCHED_ALPHAS]
        wide = [widen(scale, repeats, head_dim) for scale in candidates]
        errors = rounding_errors(statistics.sample, weights, list(schemes.values()), wide)
        fold_scale(block, group, candidates[min(range(len(errors)), key=errors.__getitem__)])


def largest_share(sample: Tensor) -> Tensor:
    """[in]: the most that each channel takes of any token of `sample` [n, in], as a share of the token's size. Every
    token has a scale of its own, so a token that is large as a whole does no harm to the others."""
    return (sample.abs() / sample.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-12)).amax(0)


def smoothing_scale(largest: Tensor, sizes: Tensor, alpha: float) -> Tensor:
    """max|x|^alpha / max|w|^(1 - alpha) per channel: what inputs are divided by and weights multiplied with."""
    scale = largest.clamp(min=_SMALLEST) ** alpha / sizes.clamp(min=_SMALLEST) ** (1 - alpha)
    return scale.clamp(min=_SMALLEST)


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
    """What the product sees of its input [n, in] under a scheme's `activations`, one scale per token."""
    if kind == "int8_token":
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127.0
        return (x / scale).round() * scale
    if kind == "fp8_token":
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
        return (x / scale).to(torch.float8_e4m3fn).float() * scale
    return x
