"""Which experts a token goes to and how they are weighted, from its router logits: one launch, a program per token.

Scores are float32; of equal scores the lower expert wins, and the chosen experts are written in ascending order, as
kernels/ref_experts.py has it. Logits that are not numbers count as the lowest, so that an id is always that of an
expert. Called by layer.py.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.base import Declined
from tokenmill.kernels.triton.shared.device import dependent_launch
from tokenmill.kernels.triton.shared.launch import options, power_of_two, uses_pdl

SCORES = ("softmax", "sigmoid", "softmax_of_selected")
GROUP_SCORES = ("two_best", "max")


class RoutingRule(Protocol):
    """The routing part of an expert layer's description."""

    @property
    def experts_per_token(self) -> int: ...
    @property
    def score(self) -> str: ...
    @property
    def normalize(self) -> bool: ...
    @property
    def scale(self) -> float: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def top_groups(self) -> int: ...
    @property
    def group_score(self) -> str: ...
    @property
    def correction_bias(self) -> Tensor | None: ...


class Variant(NamedTuple):
    """What a launch is compiled for."""

    groups: int  # padded to a power of two
    size: int  # experts of a group, likewise
    top_groups: int  # 0: experts are chosen among all
    two_best: bool
    score: str
    normalize: bool
    pdl: bool


@triton.jit
def best_groups(choice, G, VARIANT: tl.constexpr):
    """[groups, size] -> whether each group [groups] is one of the best."""
    GB: tl.constexpr = VARIANT.groups
    SB: tl.constexpr = VARIANT.size
    inside = tl.broadcast_to(tl.arange(0, SB)[None, :], (GB, SB))
    group = tl.arange(0, GB)
    best = tl.max(choice, 1)
    if VARIANT.two_best:
        first = tl.min(tl.where(choice == best[:, None], inside, SB), 1)
        second = tl.max(tl.where(inside == first[:, None], -float("inf"), choice), 1)
        best += tl.where(second == -float("inf"), 0.0, second)  # a group of one expert
    kept = group < 0
    for _ in range(VARIANT.top_groups):
        open_groups = (group < G) & (kept == 0)
        highest = tl.max(tl.where(open_groups, best, -float("inf")), 0)
        chosen = tl.min(tl.where(open_groups & (best == highest), group, GB), 0)
        kept = kept | (group == chosen)
    return kept


@triton.jit
def _route(logits, correction, ids, weights, stride, scale, E, G, SIZE, K: tl.constexpr, VARIANT: tl.constexpr):
    GB: tl.constexpr = VARIANT.groups
    SB: tl.constexpr = VARIANT.size
    BLOCK: tl.constexpr = GB * SB
    dependent_launch(VARIANT.pdl)
    token = tl.program_id(0).to(tl.int64)
    group, inside = tl.arange(0, GB)[:, None], tl.arange(0, SB)[None, :]
    ok = (group < G) & (inside < SIZE)
    expert = tl.where(ok, group * SIZE + inside, E)
    lowest = -float("inf")
    x = tl.load(logits + token * stride + expert, mask=ok, other=lowest).to(tl.float32)
    x = tl.where(x == x, x, lowest)
    if VARIANT.score == "sigmoid":
        scores = tl.sigmoid(x)
    elif VARIANT.score == "softmax":
        powers = tl.exp(x - tl.max(tl.max(x, 1), 0))
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    else:
        scores = x
    choice = scores
    if correction is not None:
        choice += tl.load(correction + expert, mask=ok, other=0.0).to(tl.float32)
    choice = tl.where(ok & (choice == choice), choice, lowest)
    if VARIANT.top_groups:
        choice = tl.where(best_groups(choice, G, VARIANT)[:, None], choice, lowest)
    selected = expert < 0
    for _ in range(K):
        candidates = ok & (selected == 0)
        best = tl.max(tl.max(tl.where(candidates, choice, lowest), 1), 0)
        place = tl.where(candidates & (choice == best), expert, E)
        selected = selected | (expert == tl.min(tl.min(place, 1), 0))
    if VARIANT.score == "softmax_of_selected":
        highest = tl.max(tl.max(tl.where(selected, x, lowest), 1), 0)
        powers = tl.where(selected, tl.exp(x - highest), 0.0)
        weight = powers / tl.sum(tl.sum(powers, 1), 0)
    else:
        weight = tl.where(selected, scores, 0.0)
        if VARIANT.normalize:
            weight = weight / (tl.sum(tl.sum(weight, 1), 0) + 1e-20)
    flags = tl.reshape(selected.to(tl.int32), (BLOCK,))  # in the order of experts
    place = tl.cumsum(flags, 0) - 1 + token * K
    tl.store(ids + place, tl.reshape(expert, (BLOCK,)), mask=flags != 0)
    tl.store(weights + place, tl.reshape(weight * scale, (BLOCK,)), mask=flags != 0)


def route(logits: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """[T, experts] -> (ids int32 [T, k] in ascending order, weights float32 [T, k])."""
    if rule.score not in SCORES or rule.group_score not in GROUP_SCORES:
        raise Declined(f"no routing kernel for scores {rule.score}, {rule.group_score}")
    tokens, num_experts = logits.shape
    grouped = rule.num_groups > 1
    groups = rule.num_groups if grouped else 1
    assert num_experts % groups == 0 and rule.experts_per_token <= num_experts, "as the description says"  # noqa: PT018
    ids = torch.empty(tokens, rule.experts_per_token, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, rule.experts_per_token, dtype=torch.float32, device=logits.device)
    size = num_experts // groups
    variant = Variant(
        groups=power_of_two(groups),
        size=power_of_two(size),
        top_groups=rule.top_groups if grouped else 0,
        two_best=rule.group_score == "two_best",
        score=rule.score,
        normalize=rule.normalize,
        pdl=uses_pdl(logits.device),
    )
    _route[(tokens,)](
        logits,
        rule.correction_bias,
        ids,
        weights,
        logits.stride(0),
        rule.scale,
        num_experts,
        groups,
        size,
        K=rule.experts_per_token,
        VARIANT=variant,
        **options(logits.device, 1 if variant.groups * variant.size <= 256 else 4, 1),
    )
    return ids, weights
