"""Speculative decoding: how much faster, at which batch (formula F10).

The target's verification step is timed by StepCost, so gains vanish by themselves at large batches and shrink on
mixtures of experts, where more tokens touch more experts. Knows nothing of drafters beyond their relative cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenmill.plan.cost.step_cost import Decode, StepCost
from tokenmill.plan.question.question import Speculation


def expected_tokens(speculation: Speculation) -> float:
    """E = (1 - a^(K+1)) / (1 - a): tokens that one verified step yields."""
    a, k = speculation.acceptance, speculation.draft_tokens
    if a >= 1.0:
        return k + 1.0
    return (1.0 - a ** (k + 1)) / (1.0 - a)


def speedup(speculation: Speculation, verify_ratio: float = 1.0) -> float:
    """E / (K c + r), where r is the verification step over a plain one."""
    return expected_tokens(speculation) / (speculation.draft_tokens * speculation.draft_cost + verify_ratio)


def verify_ratio(cost: StepCost, batch: int, mean_context: float, draft_tokens: int) -> float:
    """r(B, K): a step that checks K drafts of every sequence, over one that makes a single token for each."""
    plain = cost.decode_ms(batch, batch * mean_context)
    return max(1.0, cost.verify_ms(batch, batch * mean_context, draft_tokens) / plain)


def speedup_at(speculation: Speculation, cost: StepCost, batch: int, mean_context: float) -> float:
    return speedup(speculation, verify_ratio(cost, batch, mean_context, speculation.draft_tokens))


def speculative_step(speculation: Speculation, cost: StepCost) -> Callable[[Sequence[tuple[int, int]], Decode], float]:
    """Milliseconds per token of each decoding sequence, as `StepCost.step_ms` asks. Steps with prompts decode plainly:
    their extra rows would lengthen what every user waits for."""

    def step_ms(prefill: Sequence[tuple[int, int]], decode: Decode) -> float:
        plain = cost.step_ms(prefill, decode)
        count, context = decode if isinstance(decode, tuple) else (len(decode), float(sum(decode)))
        if prefill or not count:
            return plain
        checking = max(plain, cost.verify_ms(count, context, speculation.draft_tokens))
        drafting = speculation.draft_tokens * speculation.draft_cost * plain
        return min(plain, (checking + drafting) / expected_tokens(speculation))  # an engine stops where it does not pay

    return step_ms


def break_even_batch(gain: Callable[[int], float], limit: int = 4096) -> int:
    """The largest power-of-two batch at which speculation still pays; 0 if it never does."""
    best, batch = 0, 1
    while batch <= limit:
        if gain(batch) > 1.0:
            best = batch
        batch *= 2
    return best
