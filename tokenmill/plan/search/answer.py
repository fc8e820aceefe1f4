"""The answer to a planning question as plain values: the chosen plan with intervals and reasons, alternatives, costs.

Joins search, cost and quality into what the CLI prints, the report plots and `optimize` reads. Refuses when nothing
fits, naming the limit that binds. Owns no arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import Catalog, DeviceGroup
from tokenmill.plan.cost.performance import Figure
from tokenmill.plan.cost.speculation import break_even_batch, speedup_at
from tokenmill.plan.cost.step_cost import StepCost
from tokenmill.plan.question.deployment import bits_per_weight, total_weight_bytes
from tokenmill.plan.question.question import Limits, Question, Tuning
from tokenmill.plan.question.workload import Workload
from tokenmill.plan.search.candidates import enumerate_plans
from tokenmill.plan.search.judging import Plan, Terms
from tokenmill.plan.search.money_rows import cost_rows
from tokenmill.plan.search.reasons import plan_name, reasons, what_follows
from tokenmill.plan.search.search import CAREFUL_LOSS, SearchResult, search

_SHOWN = 8


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
        "arrivals": q.workload.arrivals.kind,
        "plan": describe(chosen, q.workload),
        "reasons": reasons(chosen, found, q.workload),
        "costs": cost_rows(chosen, q.workload, q.pricing, catalog, q.model.name, q.bill),
        "speculation": _speculation(chosen, q),
        "formats": list(_formats(found, q.workload)),
        "pareto": [_row(plan) for plan in found.front[:_SHOWN]],
        "rejected": list(_rejected(found)),
    }
    if found.bolder is not None:
        result["bolder"] = _bolder(found.bolder, chosen, q, catalog)
    if q.target_cost:
        result["target"] = _against_baseline(chosen, q)
    return result


def _bolder(plan: Plan, chosen: Plan, q: Question, catalog: Catalog) -> dict[str, Any]:
    """A cheaper plan, and what it takes for granted."""
    assumes = []
    if plan.risk.high > chosen.risk.high:
        assumes.append(f"a loss of quality up to {plan.risk.high:.1f} % ({plan.risk.reason}; not measured)")
    if plan.speculation:
        drafts = plan.speculation
        assumes.append(f"{drafts.acceptance:.0%} of {drafts.draft_tokens} drafts accepted (assumed)")
    return {
        "plan": describe(plan, q.workload),
        "costs": cost_rows(plan, q.workload, q.pricing, catalog, q.model.name, q.bill),
        "assumes": assumes,
    }


def search_question(q: Question) -> SearchResult:
    deployments = enumerate_plans(q.model, q.groups, q.fixed, narrow=len(q.groups) > 2)
    fleet = q.groups[0].count if len(q.groups) == 1 and q.fixed_fleet else 0
    loss = inf if q.weights else q.limits.quality_loss or CAREFUL_LOSS
    return search(deployments, Terms(q.workload, q.pricing, q.limits, fleet), q.tuning, loss)


def describe(plan: Plan, workload: Workload) -> dict[str, Any]:
    d, e = plan.deployment, plan.estimate
    gib = 1 << 30
    return {
        "device": d.device.name,
        "devices": plan.devices,
        "replicas": plan.replicas,
        "tp": d.tp,
        "pp": d.pp,
        "ep": d.ep,
        "data_parallel": d.data_parallel,
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
            "max_num_seqs": max(1, min(d.max_sequences, e.sequences_that_fit)),
            "max_num_batched_tokens": d.batch_tokens,
            "gpu_memory_utilization": d.utilization,
            "max_model_len": _context(plan, workload),
            "draft_tokens": plan.speculation.draft_tokens if plan.speculation else 0,
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


def _rejected(found: SearchResult) -> Iterator[dict[str, str]]:
    for each in found.refused[:_SHOWN]:
        yield {"plan": plan_name(each.deployment), "reason": each.reason}
    for plan in [plan for plan in found.plans if plan.failures][:_SHOWN]:
        yield {"plan": plan_name(plan.deployment), "reason": "; ".join(plan.failures)}


def _speculation(chosen: Plan, q: Question) -> dict[str, Any]:
    """What drafts would gain at several batches, whether the plan uses them or not."""
    drafts, cost = q.tuning.drafts, StepCost(chosen.deployment)
    context = q.workload.input_tokens + q.workload.output_tokens / 2
    return {
        "used": chosen.speculation is not None,
        "assumes": f"{drafts.draft_tokens} drafts, {drafts.acceptance:.0%} accepted",
        "speedup_by_batch": {
            str(batch): round(speedup_at(drafts, cost, batch, context), 2) for batch in sorted({1, 8, chosen.users})
        },
        "pays_up_to_batch": break_even_batch(lambda batch: speedup_at(drafts, cost, batch, context)),
    }


def _formats(found: SearchResult, workload: Workload) -> Iterator[dict[str, Any]]:
    """The best plan of every weight format, and what its KV room means."""
    seen = set()
    for plan in found.plans:
        d, e = plan.deployment, plan.estimate
        if d.weights.name not in seen:
            seen.add(d.weights.name)
            yield {
                "weights": d.weights.name,
                "kv_bits": 8 * d.kv_bytes,
                "devices": plan.devices,
                "kv_tokens": e.kv_tokens,
                "requests_that_fit": e.sequences_that_fit,
                "per_million_output": round(plan.costs.output, 4) if plan.costs else None,
                "quality_loss_high": plan.risk.high,
                "what_follows": what_follows(plan, workload),
            }


def _against_baseline(chosen: Plan, q: Question) -> dict[str, Any]:
    """The same question answered with unquantized weights and KV on the same kind of device."""
    groups = [DeviceGroup(group.device, max(group.count, 8)) for group in q.groups]
    baseline = search_question(
        replace(q, groups=groups, limits=Limits(), weights="bf16", kv="bf16", tuning=Tuning(), fixed_fleet=False)
    )
    if not baseline.plans or baseline.plans[0].costs is None or chosen.costs is None:
        return {"note": "the unquantized baseline does not fit these devices or has no price"}
    base = baseline.plans[0]
    change = chosen.costs.blended / base.costs.blended - 1  # type: ignore[union-attr]
    return {
        "wanted": q.target_cost,
        "predicted": round(change, 4),
        "met": change <= q.target_cost,
        "baseline": plan_name(base.deployment),
        "baseline_per_million_blended": round(base.costs.blended, 4),  # type: ignore[union-attr]
    }


def _closest(found: SearchResult) -> Any:
    """Of refused plans, the one with the smallest weights per device."""
    from tokenmill.plan.question.deployment import weight_bytes_per_device

    return min(found.refused, key=lambda each: weight_bytes_per_device(each.deployment))


def _row(plan: Plan) -> dict[str, Any]:
    return {
        "plan": plan_name(plan.deployment),
        "replicas": plan.replicas,
        "per_million_output": round(plan.costs.output, 4) if plan.costs else None,
        "ttft_ms": round(plan.estimate.ttft.value, 1),
        "itl_ms": round(plan.estimate.tpot.value, 2),
        "output_tok_s": round(plan.estimate.output_rate.value * plan.replicas, 1),
        "quality_loss_high": plan.risk.high,
        "keeps_promises": plan.good,
    }
