"""AWQ: before rounding, input channels that matter are scaled up and what feeds them is scaled down, then weights that
would stretch a group's range are clipped where that lowers the error of the output.

Both searches are matrix products with the inputs' second moments: no forward pass is repeated. Scales fold into the
norm or linear named by `LinearGroup.source`, through grouped-query heads too. A solver (rtn, gptq) rounds afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.log import get_logger
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.base import BlockView, LinearGroup, Statistics, Transform
from tokenmill.quantize.methods.rtn import round_to_nearest

_log = get_logger(__name__)
_UNCLIPPED = ("q_proj", "k_proj")  # their product amplifies what a clip does: AWQ leaves them alone
_SMALLEST = 1e-4
_CLIP_ROWS = 1024  # rows of a matrix whose clip is searched at once: bounds memory


class Awq(Transform):
    name = "awq"
    needs_calibration = True

    @dataclass(frozen=True, slots=True)
    class Options:
        grid: int = 20  # exponents tried between 0 and 1
        duo_scaling: bool = True  # try each exponent with the size of the weights taken into account as well
        clip: bool = True
        clip_steps: int = 10
        max_shrink: float = 0.5  # the smallest range tried is 1 - this

    def memory_bytes(self, shape: tuple[int, int]) -> int:
        """The Hessian and its scaled copy; a few copies of the matrix while candidates are rounded."""
        return 4 * (2 * shape[1] ** 2 + 5 * shape[0] * shape[1])

    @torch.no_grad()
    def apply(self, block: BlockView, scheme_of: Mapping[str, Scheme]) -> None:
        for group in block.groups:
            names = [name for name in group.names if name in scheme_of]
            if not names:
                continue
            statistics = block.statistics(group, ("hessian", "mean_abs"))
            assert statistics.hessian is not None
            if not statistics.num_tokens:
                _log.warning("%s received no tokens: neither scaled nor clipped", names[0])
                continue
            hessian = statistics.hessian
            if group.source is not None:
                scale = self._search(block, group, names, statistics, scheme_of)
                fold_scale(block, group, scale)
                wide = widen(scale, group.source_repeats, block.head_dim)
                hessian = hessian / torch.outer(wide, wide)
            if self.options.clip:
                for name in names:
                    if not name.endswith(_UNCLIPPED):
                        clipped = clip(
                            block.weight(name),
                            hessian,
                            scheme_of[name],
                            self.options.clip_steps,
                            self.options.max_shrink,
                        )
                        block.replace(name, clipped)

    def _search(
        self,
        block: BlockView,
        group: LinearGroup,
        names: Sequence[str],
        statistics: Statistics,
        scheme_of: Mapping[str, Scheme],
    ) -> Tensor:
        """The scale of the source's channels with the least error at the group's outputs."""
        assert statistics.mean_abs is not None
        assert statistics.hessian is not None
        weights = [block.weight(name) for name in names]
        schemes = [scheme_of[name] for name in names]
        repeats, head_dim = group.source_repeats, block.head_dim
        inputs = narrow(statistics.mean_abs, repeats, head_dim)
        candidates = [torch.ones_like(inputs), *candidate_scales(inputs, None, self.options.grid)]
        if self.options.duo_scaling:
            sizes = narrow(relative_size(weights, schemes), repeats, head_dim)
            candidates += candidate_scales(inputs, sizes, self.options.grid)
        best, least_error = candidates[0], float("inf")
        for scale in candidates:
            wide = widen(scale, repeats, head_dim)
            error = sum(
                output_error(rounded_under_scale(weight, wide, scheme) - weight, statistics.hessian)
                for weight, scheme in zip(weights, schemes, strict=True)
            )
            if error < least_error:
                best, least_error = scale, error
        return best


def candidate_scales(inputs: Tensor, sizes: Tensor | None, grid: int) -> list[Tensor]:
    """inputs^r, or inputs^r / sizes^(1-r), for `grid` exponents r, each with a geometric middle of 1."""
    candidates = []
    for step in range(grid):
        ratio = step / grid
        scale = inputs.clamp(min=_SMALLEST) ** ratio
        if sizes is not None:
            scale = scale / (sizes ** (1 - ratio) + _SMALLEST)
        scale = scale.clamp(min=_SMALLEST)
        scale = scale / (scale.max() * scale.min()).sqrt()
        candidates.append(torch.where(scale.isfinite(), scale, 1.0))
    return candidates


def relative_size(weights: Sequence[Tensor], schemes: Sequence[Scheme]) -> Tensor:
    """[in]: the mean over all rows of |w| as a share of its group's largest."""
    total = weights[0].new_zeros(weights[0].shape[1])
    for weight, scheme in zip(weights, schemes, strict=True):
        groups = weight.abs().view(weight.shape[0], -1, scheme.group_size or weight.shape[1])
        total += (groups / (groups.amax(-1, keepdim=True) + 1e-6)).view(weight.shape).sum(0)
    return total / sum(weight.shape[0] for weight in weights)


def rounded_under_scale(weight: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """`weight` [out, in] after scaling, rounding and undoing the scale."""
    return round_to_nearest(weight * scale, scheme).dequantize() / scale


def output_error(delta: Tensor, hessian: Tensor) -> float:
    """The mean squared change of the output, summed over rows, when the weights change by `delta`: tr(D H D^T)."""
    return float((delta @ hessian).mul_(delta).sum())


def widen(scale: Tensor, repeats: int, head_dim: int) -> Tensor:
    """A value per source channel -> one per input: each key-value head serves `repeats` query heads in a row."""
    return scale if repeats == 1 else scale.view(-1, head_dim).repeat_interleave(repeats, 0).reshape(-1)


def narrow(values: Tensor, repeats: int, head_dim: int) -> Tensor:
    """A value per input -> the mean over the inputs that one source channel feeds."""
    return values if repeats == 1 else values.view(-1, repeats, head_dim).mean(1).reshape(-1)


def fold_scale(block: BlockView, group: LinearGroup, scale: Tensor) -> None:
    """Multiply the group's inputs' weights by `scale` and divide their source by it: the block computes the same."""
    assert group.source is not None
    wide = widen(scale, group.source_repeats, block.head_dim)
    for name in group.names:
        block.replace(name, block.weight(name) * wide)
    source = block.weight(group.source)
    if group.source_is_norm:
        block.replace(group.source, source / scale)
        return
    block.replace(group.source, source / scale.unsqueeze(1))
    bias = block.bias(group.source)
    if bias is not None:
        block.replace_bias(group.source, bias / scale)


def clip(weight: Tensor, hessian: Tensor, scheme: Scheme, steps: int, max_shrink: float) -> Tensor:
    """`weight` with each group clamped to the range that minimizes the group's error at the output."""
    size = scheme.group_size or weight.shape[1]
    blocks = torch.stack([hessian[i : i + size, i : i + size] for i in range(0, weight.shape[1], size)])
    return torch.cat([_clip_rows(rows, blocks, scheme, steps, max_shrink) for rows in weight.split(_CLIP_ROWS)])


def _clip_rows(weight: Tensor, blocks: Tensor, scheme: Scheme, steps: int, max_shrink: float) -> Tensor:
    """blocks [groups, size, size]: the diagonal blocks of the Hessian."""
    groups = weight.view(weight.shape[0], -1, blocks.shape[1])
    largest = groups.abs().amax(-1, keepdim=True)  # [rows, groups, 1]
    best, least_error = groups, groups.new_full(groups.shape[:2], float("inf"))
    for step in range(steps):
        limit = largest * (1 - max_shrink * step / steps)
        tried = groups.clamp(-limit, limit)
        delta = round_to_nearest(tried.view(weight.shape), scheme).dequantize().view(groups.shape) - groups
        error = (torch.bmm(delta.transpose(0, 1), blocks).transpose(0, 1) * delta).sum(-1)
        better = error < least_error
        least_error = torch.where(better, error, least_error)
        best = torch.where(better.unsqueeze(-1), tried, best)
    return best.reshape(weight.shape)
