"""Why a plan was chosen, in sentences: what binds, what follows from its KV room, what a cheaper one would ask for.

Puts the search's figures into words; decides nothing. Called by answer.py.
"""

from __future__ import annotations

from tokenmill.plan.question.deployment import Deployment
from tokenmill.plan.question.workload import Workload
from tokenmill.plan.search.judging import Plan
from tokenmill.plan.search.search import SearchResult

_FEW = 32  # requests at once below which the compute of a data-centre GPU is mostly idle


def plan_name(d: Deployment) -> str:
    parallelism = f"tp{d.tp}" + "".join(
        f" {name}{size}" for name, size in (("pp", d.pp), ("dp", d.data_parallel), ("ep", d.ep)) if size > 1
    )
    return f"{d.device.name} x{d.devices} {parallelism} {d.weights.name} kv{8 * d.kv_bytes:g} {d.engine}"


def reasons(chosen: Plan, found: SearchResult, workload: Workload) -> list[str]:
    """Why this plan, what binds, and what a cheaper one would ask for."""
    d, memory = chosen.deployment, chosen.estimate.memory
    texts = []
    if chosen.good:
        kept = sum(plan.good and plan.risk.high <= chosen.risk.high for plan in found.plans)
        texts.append(f"cheapest of {kept} plans that keep every promise and lose no more quality")
    else:
        texts.append(f"no plan keeps every promise; this is the closest one and breaks: {'; '.join(chosen.failures)}")
    texts.append(
        f"{d.weights.name} weights and {8 * d.kv_bytes:g}-bit KV leave {chosen.estimate.kv_tokens:,} KV tokens, "
        f"{what_follows(chosen, workload)}"
    )
    share = memory.weights / (memory.usable * memory.utilization)
    texts.append(f"what limits the load: {_binding(chosen, workload)}; weights take {share:.0%} of the budget")
    texts += chosen.tuning
    if d.model.is_moe and d.group > 1:
        texts.append(_experts(chosen, found))
    if chosen.risk.high > 0:
        texts.append(
            f"expect {chosen.risk.low:.1f} to {chosen.risk.high:.1f} % quality loss ({chosen.risk.reason}): measure it "
            "with `tokenmill eval divergence` before deploying"
        )
    if workload.arrivals.kind != "poisson":
        texts.append(f"arrivals: {workload.arrivals.words or workload.arrivals.kind}")
    bolder = found.bolder
    if bolder is not None:
        drafts = " with speculation (assumed acceptance)" if bolder.speculation else ""
        texts.append(
            f"bolder: {plan_name(bolder.deployment)}{drafts}, up to {bolder.risk.high:.1f} % quality loss, not measured"
        )
    cheaper = found.nearest_cheaper
    if cheaper is not None and found.winner is not None:
        give = "; ".join(cheaper.failures)
        texts.append(f"nearest cheaper plan: {plan_name(cheaper.deployment)}, if this is acceptable: {give}")
    return texts


def what_follows(plan: Plan, workload: Workload) -> str:
    """From the KV room of a plan."""
    fit = plan.estimate.sequences_that_fit
    text = f"room for {fit:,} requests of {workload.total_tokens:,} tokens at once"
    if fit >= _FEW or plan.deployment.weights.bits <= 4.6:
        return text
    ways = ["more devices", "4-bit weights", *(["an 8-bit KV cache"] if plan.deployment.kv_bytes > 1 else [])]
    return f"{text}; so few waste the hardware and leave no memory for long contexts: {' or '.join(ways)} would help"


def _binding(plan: Plan, workload: Workload) -> str:
    found = plan.estimate
    if found.sequences_that_fit <= plan.users:
        return "KV memory"
    limits = (("TTFT", found.ttft.value, workload.ttft_ms), ("ITL", found.tpot.value, workload.itl_ms))
    near = [f"the promised {name} of {limit:g} ms" for name, value, limit in limits if limit and value > 0.85 * limit]
    return " and ".join(near) or "memory bandwidth and arithmetic"


def _experts(chosen: Plan, found: SearchResult) -> str:
    """How the experts are placed, compared with the best plan that places them differently."""
    d = chosen.deployment
    how = (
        f"whole experts on {d.ep} devices, attention {'replicated' if d.data_parallel > 1 else 'sharded'}"
        if d.ep > 1
        else f"every expert sharded over {d.group} devices"
    )
    others = [plan for plan in found.plans if (plan.deployment.ep, plan.deployment.group) != (d.ep, d.group)]
    others = [plan for plan in others if (plan.deployment.ep > 1) != (d.ep > 1)]
    if not others:
        return f"{how}: nothing else was allowed"
    other = min(others, key=Plan.order)
    money = f"${other.costs.output:.2f}" if other.costs else f"{other.estimate.output_rate.value:.0f} tokens/s"
    against = f"${chosen.costs.output:.2f}" if chosen.costs else f"{chosen.estimate.output_rate.value:.0f} tokens/s"
    return f"{how}: {against} per million output tokens against {money} of {plan_name(other.deployment)}"
