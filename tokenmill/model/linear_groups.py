"""Which matrices a model multiplies by the same input: found by tracing its forward pass with Ops that compute nothing.

So no architecture has to state it, and none can state it wrongly. Used by the loader to join them on a GPU, and to find
the projections by head of latent attention, which are no linears.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokenmill.model.architectures.decoder import Decoder
from tokenmill.model.attention.latent import HeadProjections
from tokenmill.model.formats.base import LinearWeight

if TYPE_CHECKING:
    from tokenmill.kernels.routing import RoutingSpec
    from tokenmill.model.formats.stacks import ExpertStacks


def linear_groups(decoder: Decoder) -> list[list[LinearWeight]]:
    """Every `linear` call of a step, in order, as the list of its weights."""
    ops = _Trace()
    decoder.logits(ops, decoder.forward(ops))
    return ops.groups


def adaptable_groups(decoder: Decoder) -> list[list[LinearWeight]]:
    """The same without routers and experts, whose rows are not those of the step: what adapters can change."""
    ops = _Trace()
    ops.experts = ops._nothing  # type: ignore[method-assign]
    decoder.logits(ops, decoder.forward(ops))
    return ops.groups


def head_projections(decoder: Decoder) -> list[HeadProjections]:
    """Those of every `latent_attention` call of a step."""
    ops = _Trace()
    decoder.forward(ops)
    return ops.projections


class _Trace:
    """Ops whose values are all None."""

    def __init__(self) -> None:
        self.groups: list[list[LinearWeight]] = []
        self.projections: list[HeadProjections] = []

    def linear(self, _x: None, weights: Sequence[LinearWeight]) -> list[None]:
        self.groups.append(list(weights))
        return [None] * len(weights)

    def latent_attention(self, *arguments: Any) -> None:
        self.projections += [each for each in arguments if isinstance(each, HeadProjections)]

    def add_rms_norm(self, *_: Any) -> tuple[None, None]:
        return None, None

    def split(self, _x: None, widths: Sequence[int], heads: int = 1) -> list[None]:  # noqa: ARG002
        return [None] * len(widths)

    def experts(self, _x: None, router: LinearWeight, stacks: ExpertStacks, _routing: RoutingSpec) -> None:
        self.groups.append([router])
        for inputs, outputs in zip(stacks.gate_up.experts, stacks.down.experts, strict=True):
            self.groups += [list(inputs), list(outputs)]

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    embed = add_positions = rms_norm = layer_norm = add = scale = rope = attention = _nothing
    gated = activate = gate_rows = select_rows = softcap = _nothing
    join = convolve = scan = gated_norm = _nothing
