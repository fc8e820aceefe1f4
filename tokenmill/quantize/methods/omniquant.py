"""OmniQuant's equivalent transformation: scales that move between a block's weights without changing what it computes,
learned before gptq rounds them.

What gptq will leave is known without rounding: in each group of columns the squared step times the sum of the pivots of
the inputs' second moments. A scale of an input divides its pivot and stretches its column, so that the sum has
gradients in the scales and no forward pass is repeated. Scales are folded like AWQ's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.base import BlockView, LinearGroup, Transform
from tokenmill.quantize.methods.awq import fold_scale, widen
from tokenmill.quantize.methods.gptq import column_order, factor_hessian

_DAMPING = 0.01


class OmniQuant(Transform):
    name = "omniquant"
    needs_calibration = True

    @dataclass(frozen=True, slots=True)
    class Options:
        steps: int = 60
        rate: float = 0.03  # of the logs of scales, in the first step

    def scheme(self, scheme: Scheme) -> Scheme:
        if self.options.steps < 1 or self.options.rate <= 0:
            raise UserError("omniquant: an option is below its minimum", "give steps from 1 and a rate above 0")
        if scheme.element != "int" or scheme.activations != "none":
            kind = f"{scheme.element} with inputs as {scheme.activations}"
            raise UserError(
                f"omniquant learns scales for integer weights and float inputs, not for {kind}",
                "use smoothquant where inputs are rounded, and gptq, rtn or autoround after omniquant",
            )
        return scheme

    def memory_bytes(self, shape: tuple[int, int]) -> int:
        """The Hessian while it is factored; the weights, stretched, with what autograd keeps of them."""
        return 4 * (3 * shape[1] ** 2 + 6 * shape[0] * shape[1])

    def operations(self, num_weights: int, length: int) -> float:
        """Passes over the weights, each of which takes the time of some ten products."""
        del length
        return self.options.steps * num_weights * 150.0

    def apply(self, block: BlockView, scheme_of: Mapping[str, Scheme]) -> None:
        for group in block.groups:
            names = [name for name in group.names if name in scheme_of]
            if names and group.source is not None:
                fold_scale(block, group, self._learn(block, group, names, scheme_of))

    def _learn(
        self, block: BlockView, group: LinearGroup, names: Sequence[str], scheme_of: Mapping[str, Scheme]
    ) -> Tensor:
        """The scale of each channel of the group's source."""
        assert group.source is not None
        hessian = block.statistics(group, ("hessian",)).hessian
        assert hessian is not None
        wide = partial(widen, repeats=group.source_repeats, head_dim=block.head_dim)
        terms = []
        for scheme in dict.fromkeys(scheme_of[name] for name in names):
            same = [block.weight(name) for name in names if scheme_of[name] == scheme]
            terms.append((torch.cat(same), pivots(hessian, scheme.group_size), scheme))
        channels = block.weight(group.source)
        logs = channels.new_zeros(len(channels)).requires_grad_()
        optimizer = torch.optim.Adam([logs])
        with torch.enable_grad():
            for step in range(self.options.steps):
                optimizer.param_groups[0]["lr"] = self.options.rate * (1 - step / self.options.steps)
                scale = wide(logs).exp()
                noise = torch.stack([expected_error(*term, scale) for term in terms]).sum()
                optimizer.zero_grad()
                noise.log().backward()
                optimizer.step()
        return logs.detach().exp()


def pivots(hessian: Tensor, group_size: int) -> Tensor:
    """[in]: what is left of each input's second moment once the columns rounded after it have compensated."""
    order = column_order(hessian.diagonal(), group_size, "gar")
    factor, _ = factor_hessian(hessian, _DAMPING, order)
    assert order is not None
    values = torch.empty_like(factor.diagonal())
    values[order] = factor.diagonal().square().reciprocal()
    return values.masked_fill_(hessian.diagonal() == 0, 0.0)  # inputs that are always zero cost nothing


def expected_error(weight: Tensor, left: Tensor, scheme: Scheme, scale: Tensor) -> Tensor:
    """Of `weight` [out, in] with its columns times `scale` and its inputs divided by it, up to a factor that the bits
    decide: for every row, the squared range of each group times the sum of its pivots `left`."""
    size = scheme.group_size or weight.shape[1]
    groups = (weight * scale).unflatten(1, (-1, size))
    if scheme.symmetric:
        span = groups.abs().amax(-1)
    else:
        span = (groups.amax(-1).clamp(min=0.0) - groups.amin(-1).clamp(max=0.0)) / 2
    return (span.square().sum(0) * (left / scale.square()).unflatten(0, (-1, size)).sum(-1)).sum() / 4.0**scheme.bits
