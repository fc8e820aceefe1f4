"""Price of an hour of this machine, and projected savings on the accelerators the user names.

Prices and devices are the catalog's, times and costs the planner's. Called by the job.
"""

from __future__ import annotations

from typing import Any

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import Catalog
from tokenmill.hardware.machine import Machine
from tokenmill.plan.question.planned_model import PlannedModel
from tokenmill.plan.question.pricing import Pricing
from tokenmill.plan.question.question import Limits, Question
from tokenmill.plan.question.workload import Workload
from tokenmill.plan.search.answer import answer

_BY_ARCHITECTURE = {"aarch64": "neoverse-n1", "arm64": "neoverse-n1", "x86_64": "xeon-8480", "AMD64": "xeon-8480"}


def machine_price(catalog: Catalog, machine: Machine, stated: float | None) -> tuple[float, str]:
    """($ per hour, its source). Servers are rented in slices: the share of the price is the share of the memory."""
    if stated is not None:
        return Pricing(stated).price or 0.0, "stated with --price"
    try:
        device = catalog.find_device(machine.cpu)
    except UserError:
        device = catalog.find_device(_BY_ARCHITECTURE.get(machine.architecture, "xeon-8480"))
    share = min(1.0, machine.memory_bytes / (device.memory_gb * 1e9))
    hour = Pricing().device_hour(device) * share
    price = device.price
    source = f"{price.source}, {price.date}" if price else "stated"
    return hour, f"{share:.0%} of a {device.name} by memory ({source}); give --price for yours"


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
