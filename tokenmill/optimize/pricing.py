"""What a token costs here: the hour of this device, the tokens it is paid for, projections to other accelerators.

With latency objectives a token counts only where its request kept them (goodput). Prices and devices are the catalog's,
times and costs on other hardware the planner's. Called by the job.
"""

from __future__ import annotations

import re
from typing import Any

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import Catalog, Device
from tokenmill.hardware.machine import Machine
from tokenmill.optimize.results import CandidateResult
from tokenmill.plan.cost.ceilings import dollars_per_million
from tokenmill.plan.question.planned_model import PlannedModel
from tokenmill.plan.question.pricing import Pricing
from tokenmill.plan.question.question import Limits, Question
from tokenmill.plan.question.workload import Workload
from tokenmill.plan.search.answer import answer

_BY_ARCHITECTURE = {"aarch64": "neoverse-n1", "arm64": "neoverse-n1", "x86_64": "xeon-8480", "AMD64": "xeon-8480"}
_ASSUMED_PRICE = 1.0  # $ per hour of a device without a known price; savings are ratios and do not depend on it


def token_price(result: CandidateResult, dollars_per_hour: float, in_objective: bool) -> float | None:
    """$ per million output tokens. `in_objective`: of the requests that kept the latency objectives, at the rate that
    is sustained; else at the measured throughput. None where there is neither: a replay at a given rate says nothing
    of what a machine could do."""
    goodput, throughput = result.goodput_tok_s, result.speed.output_tok_s if result.speed else None
    rate = goodput if in_objective and goodput is not None else throughput
    return dollars_per_million(dollars_per_hour, rate) if rate else None


def this_device(catalog: Catalog, machine: Machine, kind: str) -> Device | None:
    """The catalog's row for the `kind` ("cpu" or "cuda") that the model runs on; None: a GPU that has none."""
    if kind == "cuda":
        return find_gpu(catalog, machine.gpus[0]) if machine.gpus else None
    try:
        return catalog.find_device(machine.cpu)
    except UserError:
        return catalog.find_device(_BY_ARCHITECTURE.get(machine.architecture, "xeon-8480"))


def find_gpu(catalog: Catalog, reported: str) -> Device | None:
    """The row of a GPU by the name its driver reports ("NVIDIA A100-SXM4-80GB, 81920 MiB"): the spelling with the most
    words of it, then the nearest memory."""
    name, _, memory = reported.partition(",")
    words = _words(name)
    gigabytes = float(re.sub(r"[^\d.]", "", memory) or 0) * 2**20 / 1e9
    found: list[tuple[int, float, str]] = []
    for spelling, device in catalog.names.items():
        row = catalog.devices[device]
        if row.kind in ("gpu", "soc") and _words(spelling) <= words:
            found.append((-len(_words(spelling)), abs(row.memory_gb - gigabytes), device))
    return catalog.devices[min(found)[2]] if found else None


def _words(name: str) -> set[str]:
    """{"a100", "sxm", "80"} of "A100-SXM4-80GB"."""
    words = re.split(r"[\s_-]+", name.lower())
    return {re.sub(r"^(sxm)\d$|^(\d+)gb$", r"\1\2", word) for word in words if word}


def machine_price(catalog: Catalog, machine: Machine, stated: float | None, kind: str = "cpu") -> tuple[float, str]:
    """($ per hour of the device that the model runs on, source of the price). A GPU is rented whole; CPU servers are
    rented in slices: the share of the price is the share of the memory."""
    if stated is not None:
        return Pricing(stated).price or 0.0, "stated with --price"
    device = this_device(catalog, machine, kind)
    if device is None or device.price is None:
        name = machine.gpus[0].partition(",")[0] if kind == "cuda" and machine.gpus else machine.cpu
        return _ASSUMED_PRICE, f"assumed: no price is known for {name}; give --price for yours"
    share = 1.0 if kind == "cuda" else min(1.0, machine.memory_bytes / (device.memory_gb * 1e9))
    part = f"one {device.name}" if kind == "cuda" else f"{share:.0%} of a {device.name} by memory"
    source = f"{device.price.source}, {device.price.date}"
    return Pricing().device_hour(device) * share, f"{part} ({source}); give --price for yours"


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
