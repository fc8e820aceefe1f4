"""Batch limits and speculation of a plan: what is chosen where the user fixed nothing, and why.

Sequences per step: as many as keep the promised ITL. Tokens per step: the engine's default, unless a promise or KV
memory requires another. Speculation: where it clearly pays at the plan's own batch. Judges with judging.py; called by
search.py for the leading plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tokenmill.plan.cost.step_cost import StepCost
from tokenmill.plan.question.deployment import Deployment, plan_memory, room_for
from tokenmill.plan.question.engines import default_limits
from tokenmill.plan.question.question import Speculation, Tuning
from tokenmill.plan.search.judging import Plan, Terms, refusal

_STEPS = (0.25, 1, 2)  # tokens of a step, relative to the engine's default
_MAX_SEQUENCES = 1024
_TIGHT_TOKENS, _TIGHT_SEQUENCES = 2048, 32  # the smallest limits considered
_CLEARLY = 0.97  # of the cost: a change of the engine's defaults must gain at least this much
_SPECULATION_PAYS = 0.9  # the same for speculation, which rests on an assumed acceptance


def first_choice(deployment: Deployment, terms: Terms, tuning: Tuning) -> tuple[str, Deployment]:
    """(why it is refused, the deployment to judge). Where the engine's default limits leave too little for KV, tight
    ones are tried before it is refused."""
    fixed = tuning.applied(deployment)
    if tuning.fixed_speculation(deployment):
        fixed = tuning.with_drafter(fixed)
    reason = refusal(fixed, terms.workload)
    if not reason:
        return "", fixed
    tight = replace(
        fixed,
        batch_tokens=min(_TIGHT_TOKENS, deployment.batch_tokens),
        max_sequences=min(_TIGHT_SEQUENCES, deployment.max_sequences),
    )
    tight = tuning.applied(tight)
    hopeless = tight == fixed or not plan_memory(tight).fits
    return (reason, fixed) if hopeless or refusal(tight, terms.workload) else ("", tight)


def tuned(plan: Plan, cost: StepCost, terms: Terms, tuning: Tuning, speculates: bool = True) -> Plan:
    """The plan with the batch limits and the speculation that serve it best, and the reasons. `speculates`: whether
    `auto` may count on an assumed acceptance."""
    cost = cost.with_kv(plan.deployment)
    best = plan
    for limits in _limits(plan, cost, terms, tuning):
        other = terms.judge(limits, cost, plan.speculation)
        if _better(other, best, _CLEARLY):
            best = other
    plain = best
    if speculates and tuning.speculation == "auto" and best.deployment.can_speculate:
        drafted = tuning.with_drafter(best.deployment)
        if not refusal(drafted, terms.workload):
            drafting = terms.judge(drafted, cost, tuning.drafts)
            best = drafting if _better(drafting, best, _SPECULATION_PAYS) else best
    best, bound = _bounded(best, cost, terms, tuning)
    reasons = [*_step_reason(best, tuning), bound, _speculation_reason(best, plain, terms, cost, tuning, speculates)]
    return replace(best, tuning=tuple(filter(None, reasons)))


def _limits(plan: Plan, cost: StepCost, terms: Terms, tuning: Tuning) -> Iterator[Deployment]:
    """Other limits that fit into memory: larger batches where the load fills them, other steps where a promise breaks
    (engines were measured with their default step)."""
    d = plan.deployment
    default = default_limits(d.engine, d.device.kind).tokens
    steps = (
        [round(default * share) for share in _STEPS] if plan.failures and not tuning.batch_tokens else [d.batch_tokens]
    )
    filled = plan.users >= d.max_sequences and not tuning.max_sequences
    for sequences in (d.max_sequences, _MAX_SEQUENCES) if filled else (d.max_sequences,):
        for tokens in steps:
            other = replace(d, max_sequences=sequences, batch_tokens=tokens)
            if other != d and not refusal(other, terms.workload):
                yield other
    if plan.failures and terms.workload.itl_ms and not tuning.max_sequences:  # excess users may wait instead
        fewer = _sequences_within(d, cost, terms, plan.speculation)
        if 0 < fewer < plan.users:
            yield replace(d, max_sequences=fewer)


def _better(other: Plan, plan: Plan, share: float) -> bool:
    """Fewer broken promises, or clearly less missed, or clearly cheaper."""
    if len(other.failures) != len(plan.failures):
        return len(other.failures) < len(plan.failures)
    if plan.failures:
        return other.excess < share * plan.excess
    return other.rank[0] < share * plan.rank[0]


def _sequences_within(deployment: Deployment, cost: StepCost, terms: Terms, speculation: Speculation | None) -> int:
    """The largest batch that keeps the promised time between tokens even when others wait; 0: not even one."""
    room = room_for(deployment, terms.workload.total_tokens)
    good, late = 0, min(_MAX_SEQUENCES, room.sequences) + 1
    while late - good > 1:
        limit = (good + late) // 2
        full = replace(deployment, max_sequences=limit)
        if terms.estimate(full, 2 * limit, cost, speculation, room).tpot.value <= terms.workload.itl_ms:
            good = limit
        else:
            late = limit
    return good


def _bounded(plan: Plan, cost: StepCost, terms: Terms, tuning: Tuning) -> tuple[Plan, str]:
    """With the limit on sequences that keeps the promise when more users come than are planned for."""
    d, fit = plan.deployment, plan.estimate.sequences_that_fit
    if tuning.max_sequences:
        return plan, f"{d.max_sequences} sequences a step: fixed by the user"
    itl = terms.workload.itl_ms
    within = _sequences_within(d, cost, terms, plan.speculation) if itl else 0
    if not within:  # no promise, or one that cannot be kept
        most = max(1, min(d.max_sequences, fit))
        why = "as many as fit into KV memory" if most == fit else "more would not raise throughput"
        return replace(plan, deployment=replace(d, max_sequences=most)), f"{most} sequences a step: {why}"
    most = max(1, min(within, fit))
    found = terms.judge(replace(d, max_sequences=most), cost, plan.speculation)
    if len(found.failures) > len(plan.failures):
        return plan, f"{d.max_sequences} sequences a step: fewer would break another promise"
    why = f"one more would break the ITL of {itl:g} ms" if most == within < fit else "as many as fit into KV memory"
    return found, f"{most} sequences a step: {why}"


def _step_reason(best: Plan, tuning: Tuning) -> Iterator[str]:
    d, default = best.deployment, default_limits(best.deployment.engine, best.deployment.device.kind).tokens
    if tuning.batch_tokens:
        yield f"{d.batch_tokens:,} tokens a step: fixed by the user"
    elif d.batch_tokens == default:
        yield f"{default:,} tokens a step: the engine's default"
    else:
        gained = (plan_memory(d).kv - plan_memory(replace(d, batch_tokens=default)).kv) / (1 << 30)
        effect = f"leaves {gained:.1f} GiB more for KV" if gained > 0 else "takes more prompts at once"
        yield f"{d.batch_tokens:,} tokens a step: {effect} than the default {default:,}"


def _speculation_reason(best: Plan, plain: Plan, terms: Terms, cost: StepCost, tuning: Tuning, speculates: bool) -> str:
    drafts = tuning.drafts
    assumed = f"{drafts.draft_tokens} drafts, {drafts.acceptance:.0%} accepted (assumed: measure it)"
    if tuning.speculation != "auto":
        return f"speculation {tuning.speculation}: fixed by the user" + (f", {assumed}" if best.speculation else "")
    if not best.deployment.can_speculate:
        return "speculation off: engines do not offer it across pipeline stages"
    if not speculates:
        return "speculation off: its acceptance is not measured"
    if best.speculation:
        before = terms.estimate(plain.deployment, plain.users, cost)
        return f"speculation on: {assumed}; without it ITL {before.tpot.value:.1f} ms" + (
            f" and ${plain.costs.output:.2f} per million output tokens" if plain.costs else ""
        )
    return f"speculation off: with {assumed} it gains less than {1 - _SPECULATION_PAYS:.0%} at {best.users} users"
