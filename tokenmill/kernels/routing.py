"""How the experts of a token are chosen: the record that layers pass to Ops and kernels; ref_experts.py is the spec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RoutingSpec:
    """How the experts of a token are chosen, weighted and activated."""

    experts_per_token: int
    score: str = "softmax"  # "softmax" | "sigmoid" | "softmax_of_selected"
    normalize: bool = True  # the weights of the chosen experts are divided by their sum
    scale: float = 1.0
    num_groups: int = 1  # experts are chosen within the best `top_groups` groups
    top_groups: int = 1
    group_score: str = "two_best"  # of a group: the sum of its "two_best" scores, or its "max"
    correction_bias: Tensor | None = None  # [experts] float32: added to the scores for choosing, not for weighting
    activation: str = "silu"  # of the gate, as in `ref.gated`
    clamp: float = 0.0  # gate and up are clamped (GPT-OSS); 0: off
    weights_on_input: bool = False  # weights multiply what an expert reads, not what it returns
