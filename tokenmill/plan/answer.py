"""The answer to a planning question as plain values: the chosen plan with intervals and reasons, its rivals, its costs.

Joins search, cost and quality into what the CLI prints, the report plots and `optimize` reads. Refuses when nothing
fits, naming the limit that binds. Owns no arithmetic.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import ApiPrice, Catalog, DeviceGroup
from tokenmill.plan.candidates import enumerate_plans
from tokenmill.plan.cost import Pricing, break_even
from tokenmill.plan.deployment import bits_per_weight, total_weight_bytes
from tokenmill.plan.performance import Figure
from tokenmill.plan.planned_model import PlannedModel
from tokenmill.plan.search import Limits, Plan, SearchResult, search
from tokenmill.plan.speculation import Speculation, speedup_at
from tokenmill.plan.step_cost import StepCost
from tokenmill.plan.workload import Workload

_SHOWN = 8
_RIVALS = 4
_SPECULATION = Speculation(4, 0.6, 0.03)  # n-gram or small head: four drafts, 60 % accepted


@dataclass(frozen=True, slots=True)
class Question:
    model: PlannedModel
    groups: Sequence[DeviceGroup]
    workload: Workload
    pricing: Pricing
    limits: Limits
    weights: str = ""
    kv: str = ""
    engine: str = ""
    tp: int = 0
    fixed_fleet: bool = True  # the stated devices are all there are, and all are paid
    target_cost: float = 0.0  # -0.6: at least 60 % below the baseline
    traits: tuple[str, ...] = ()  # of the use, for the decision guide (plan/guide.py)


def answer(question: Question, catalog: Catalog, found: SearchResult | None = None) -> dict[str, Any]:
    """`found`: the question's search, where the caller has it already."""
    q = question
    found = found or search_question(q)
    if not found.plans:
        best = found.refused[0] if len(found.refused) == 1 else _closest(found)
        d = best.deployment
        raise UserError(
            f"{q.model.name} as {d.weights.name} with {8 * d.kv_bytes:g}-bit KV on {d.device.name} x{d.devices} is "
            f"refused: {best.reason}",
            "use fewer bits per weight, more or larger devices, shorter requests or a looser limit",
        )
    chosen = found.winner or found.plans[0]
    result: dict[str, Any] = {
        "model": q.model.name,
        "parameters": q.model.parameters,
        "feasible": found.winner is not None,
        "plan": describe(chosen, q.workload),
        "reasons": reasons(chosen, found, q),
        "costs": _costs(chosen, q, catalog),
        "speculation": _speculation(chosen, q.workload),
        "pareto": [_row(plan) for plan in found.front[:_SHOWN]],
        "rejected": [{"plan": _name(each.deployment), "reason": each.reason} for each in list(found.refused)[:_SHOWN]]
        + [{"plan": _name(p.deployment), "reason": "; ".join(p.failures)} for p in found.plans if p.failures][:_SHOWN],
    }
    if q.target_cost:
        result["target"] = _against_baseline(chosen, q)
    return result


def search_question(q: Question) -> SearchResult:
    deployments = enumerate_plans(
        q.model, q.groups, weights=q.weights, kv=q.kv, engine=q.engine, tp=q.tp, narrow=len(q.groups) > 2
    )
    fleet = q.groups[0].count if len(q.groups) == 1 and q.fixed_fleet else 0
    return search(deployments, q.workload, q.pricing, q.limits, fleet)


def describe(plan: Plan, workload: Workload) -> dict[str, Any]:
    d, e = plan.deployment, plan.estimate
    gib = 1 << 30
    return {
        "device": d.device.name,
        "devices": plan.devices,
        "replicas": plan.replicas,
        "tp": d.tp,
        "pp": d.pp,
        "engine": d.engine,
        "weights": d.weights.name,
        "stored_weights": d.model.stored_format,
        "bits_per_weight": round(bits_per_weight(d.model, d.weights), 3),
        "weight_bytes": int(total_weight_bytes(d.model, d.weights)),
        "kv_bits": 8 * d.kv_bytes,
        "kv_tokens": e.kv_tokens,
        "requests_that_fit": e.sequences_that_fit,
        "users_per_replica": plan.users,
        "settings": {
            "max_num_seqs": min(d.max_sequences, max(1, e.sequences_that_fit)),
            "max_num_batched_tokens": d.batch_tokens,
            "gpu_memory_utilization": d.utilization,
            "max_model_len": _context(plan, workload),
        },
        "memory_gib_per_device": {
            "usable": round(e.memory.usable * e.memory.utilization / gib, 2),
            "weights": round(e.memory.weights / gib, 2),
            "activations": round(e.memory.activations / gib, 2),
            "runtime": round(e.memory.runtime / gib, 2),
            "kv": round(e.memory.kv / gib, 2),
        },
        "ttft_ms": figure(e.ttft),
        "itl_ms": figure(e.tpot),
        "output_tok_s": figure(e.output_rate.scaled(plan.replicas, "tokens/s")),
        "quality_loss_percent": {"low": plan.risk.low, "high": plan.risk.high, "basis": plan.risk.reason},
        "broken_promises": list(plan.failures),
    }


def _context(plan: Plan, workload: Workload) -> int:
    """Requests vary: twice the mean in round numbers, as far as the model and the KV cache reach."""
    wanted = 1 << (2 * workload.total_tokens - 1).bit_length()
    return max(workload.total_tokens, min(wanted, plan.deployment.model.context_length, plan.estimate.kv_tokens))


def figure(value: Figure) -> dict[str, Any]:
    return {
        "value": round(value.value, 3),
        "low": round(value.low, 3),
        "high": round(value.high, 3),
        "basis": value.basis,
    }


def reasons(chosen: Plan, found: SearchResult, q: Question) -> list[str]:
    """Why this plan, what binds, and what a cheaper one would ask for."""
    d, e, memory = chosen.deployment, chosen.estimate, chosen.estimate.memory
    texts = []
    if chosen.good:
        texts.append(f"cheapest of {sum(plan.good for plan in found.plans)} plans that keep every promise")
    else:
        texts.append(f"no plan keeps every promise; this comes nearest and breaks: {'; '.join(chosen.failures)}")
    texts.append(
        f"{d.weights.name} weights and {8 * d.kv_bytes:g}-bit KV leave {e.kv_tokens:,} KV tokens, room for "
        f"{e.sequences_that_fit} requests of {q.workload.total_tokens:,} tokens at once"
    )
    budget = memory.usable * memory.utilization
    binding = "KV memory" if e.sequences_that_fit <= chosen.users else "memory bandwidth and arithmetic"
    texts.append(f"what limits the load: {binding}; weights take {100 * memory.weights / budget:.0f} % of the budget")
    if e.sequences_that_fit < 32 and d.weights.bits > 4.6:
        texts.append("so few requests at once waste the hardware: more devices or 4-bit weights would raise throughput")
    if chosen.risk.high > 0:
        texts.append(
            f"expect {chosen.risk.low:.1f} to {chosen.risk.high:.1f} % quality loss ({chosen.risk.reason}): measure it "
            "with `tokenmill eval divergence` before deploying"
        )
    cheaper = found.nearest_cheaper
    if cheaper is not None and found.winner is not None:
        texts.append(f"nearest cheaper plan: {_name(cheaper.deployment)}, if {'; '.join(cheaper.failures)} may give")
    return texts


def _costs(chosen: Plan, q: Question, catalog: Catalog) -> dict[str, Any]:
    costs = chosen.costs
    if costs is None:
        return {"note": f"no price is known for {chosen.deployment.device.name}: give --price"}
    price = chosen.deployment.device.price
    full = costs.blended * q.pricing.utilization
    stated = q.pricing.price is not None or price is None
    return {
        "dollars_per_hour": round(costs.hourly, 3),
        "dollars_per_month": round(costs.monthly, 0),
        "utilization": q.pricing.utilization,
        "per_million_uncached_input": round(costs.uncached_input, 4),
        "per_million_cached_input": round(costs.cached_input, 4),
        "per_million_output": round(costs.output, 4),
        "per_million_blended": round(costs.blended, 4),
        "price_basis": "stated" if stated else f"{price.source} ({price.date})",  # type: ignore[union-attr]
        "break_even": [
            {
                "against": each.against,
                "api_blended": round(each.api_blended, 4),
                "utilization": round(each.utilization, 3),
                "possible": each.utilization <= 1,
            }
            for each in (break_even(api, q.workload, full) for api in _rivals(catalog, q.model.name))
        ],
    }


def _rivals(catalog: Catalog, model: str) -> list[ApiPrice]:
    """The APIs whose model is named most alike, at most four; another size counts as unlike."""
    size = re.search(r"\d+b", model.lower())

    def likeness(api: ApiPrice) -> float:
        other = re.search(r"\d+b", api.model)
        differs = size is not None and other is not None and size[0] != other[0]
        return difflib.SequenceMatcher(None, api.model, model.lower()).ratio() - differs

    return sorted(catalog.apis, key=likeness, reverse=True)[:_RIVALS]


def _speculation(chosen: Plan, workload: Workload) -> dict[str, Any]:
    context = workload.input_tokens + workload.output_tokens / 2
    cost = StepCost(chosen.deployment)
    gains = {str(batch): round(speedup_at(_SPECULATION, cost, batch, context), 2) for batch in (1, 8, chosen.users)}
    return {
        "assumes": f"{_SPECULATION.draft_tokens} drafts, {_SPECULATION.acceptance:.0%} accepted",
        "speedup_by_batch": gains,
        "advice": "worth trying" if gains[str(chosen.users)] > 1.1 else "not at this load",
    }


def _against_baseline(chosen: Plan, q: Question) -> dict[str, Any]:
    """The same question answered with unquantized weights and KV on the same kind of device."""
    groups = [DeviceGroup(group.device, max(group.count, 8)) for group in q.groups]
    baseline = search_question(
        Question(q.model, groups, q.workload, q.pricing, Limits(), weights="bf16", kv="bf16", fixed_fleet=False)
    )
    if not baseline.plans or baseline.plans[0].costs is None or chosen.costs is None:
        return {"note": "the unquantized baseline does not fit these devices or has no price"}
    base = baseline.plans[0]
    change = chosen.costs.blended / base.costs.blended - 1  # type: ignore[union-attr]
    return {
        "wanted": q.target_cost,
        "predicted": round(change, 4),
        "met": change <= q.target_cost,
        "baseline": _name(base.deployment),
        "baseline_per_million_blended": round(base.costs.blended, 4),  # type: ignore[union-attr]
    }


def _closest(found: SearchResult) -> Any:
    """Of refused plans, the one with the smallest weights per device."""
    from tokenmill.plan.deployment import weight_bytes_per_device

    return min(found.refused, key=lambda each: weight_bytes_per_device(each.deployment))


def _name(d: Any) -> str:
    cut = f"tp{d.tp}" + (f" pp{d.pp}" if d.pp > 1 else "")
    return f"{d.device.name} x{d.devices} {cut} {d.weights.name} kv{8 * d.kv_bytes:g} {d.engine}"


def _row(plan: Plan) -> dict[str, Any]:
    return {
        "plan": _name(plan.deployment),
        "replicas": plan.replicas,
        "per_million_output": round(plan.costs.output, 4) if plan.costs else None,
        "ttft_ms": round(plan.estimate.ttft.value, 1),
        "itl_ms": round(plan.estimate.tpot.value, 2),
        "output_tok_s": round(plan.estimate.output_rate.value * plan.replicas, 1),
        "quality_loss_high": plan.risk.high,
        "keeps_promises": plan.good,
    }
