"""What a token costs here: the hour of this device, the tokens it is paid for, projections to other accelerators.

With latency objectives a token counts only where its request kept them (goodput). Prices and devices are the catalog's,
times and costs on other hardware the planner's. Called by the job.
"""

from __future__ import annotations

from typing import Any

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import Catalog
from tokenmill.hardware.device_price import hour_price
from tokenmill.hardware.machine import Machine
from tokenmill.optimize.results import CandidateResult
from tokenmill.plan.cost.ceilings import dollars_per_million
from tokenmill.plan.question.planned_model import PlannedModel
from tokenmill.plan.question.pricing import Pricing
from tokenmill.plan.question.question import Limits, Question
from tokenmill.plan.question.workload import Workload
from tokenmill.plan.search.answer import answer

_ASSUMED_PRICE = 1.0  # $ per hour of a device without a known price; savings are ratios and do not depend on it


def token_price(result: CandidateResult, dollars_per_hour: float, in_objective: bool) -> float | None:
    """$ per million output tokens. `in_objective`: of the requests that kept the latency objectives, at the rate that
    is sustained; else at the measured throughput. None where there is neither: a replay at a given rate says nothing
    of what a machine could do."""
    goodput, throughput = result.goodput_tok_s, result.speed.output_tok_s if result.speed else None
    rate = goodput if in_objective and goodput is not None else throughput
    return dollars_per_million(dollars_per_hour, rate) if rate else None


def machine_price(catalog: Catalog, machine: Machine, stated: float | None, kind: str = "cpu") -> tuple[float, str]:
    """($ per hour of the device that the model runs on, source of the price)."""
    if stated is not None:
        return Pricing(stated).price or 0.0, "stated with --price"
    price, basis = hour_price(catalog, machine, kind)
    if price is None:
        return _ASSUMED_PRICE, f"assumed: no price is known for {basis}; give --price for yours"
    return price, f"{basis}; give --price for yours"


def project(
    catalog: Catalog, names: list[str], model: PlannedModel, workload: Workload, bits: float
) -> list[dict[str, Any]]:
    """The planner's costs of the unquantized model and of one with `bits` bits, on each accelerator."""
    weights = "bf16" if bits > 12 else "int8" if bits > 6 else "int4-g128"
    rows = []
    for name in names:
        group = catalog.parse_gpu(name)
        row: dict[str, Any] = {"gpu": name, "weights": weights}
        try:
            plans = [
                answer(Question(model, [group], workload, Pricing(), Limits(), weights=each, kv="bf16"), catalog)
                for each in ("bf16", weights)
            ]
        except UserError as error:
            rows.append({**row, "note": str(error)})
            continue
        before, after = (plan["costs"].get("per_million_blended") for plan in plans)
        row |= {
            "baseline_per_million": before,
            "per_million": after,
            "cost_reduction": None if not before or after is None else 1 - after / before,
            "ttft_ms": plans[1]["plan"]["ttft_ms"],
            "itl_ms": plans[1]["plan"]["itl_ms"],
            "output_tok_s": plans[1]["plan"]["output_tok_s"],
        }
        rows.append(row)
    return rows
