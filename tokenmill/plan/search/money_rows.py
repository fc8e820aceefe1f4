"""The money part of an answer: what tokens cost, compared with API prices and with today's bill.

Arithmetic is cost.py's; here it becomes plain values. Called by answer.py.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import asdict
from typing import Any

from tokenmill.hardware.catalog import ApiPrice, Catalog, Device
from tokenmill.plan.question.pricing import Bill, Pricing
from tokenmill.plan.question.workload import Workload
from tokenmill.plan.search.judging import Plan
from tokenmill.plan.search.money import against_bill, break_even

_RIVALS = 4


def cost_rows(
    chosen: Plan, workload: Workload, pricing: Pricing, catalog: Catalog, model: str, bill: Bill | None = None
) -> dict[str, Any]:
    costs, device = chosen.costs, chosen.deployment.device
    if costs is None:
        return {"note": f"no price is known for {device.name}: give --price"}
    full = costs.blended * pricing.utilization
    given = pricing.price is not None or device.price is None
    result = {
        "dollars_per_hour": round(costs.hourly, 3),
        "dollars_per_month": round(costs.monthly, 0),
        "utilization": pricing.utilization,
        "per_million_uncached_input": round(costs.uncached_input, 4),
        "per_million_cached_input": round(costs.cached_input, 4),
        "per_million_output": round(costs.output, 4),
        "per_million_blended": round(costs.blended, 4),
        "price_basis": "given by the user" if given else _source(device),
        "hour_of_a_device": {key: round(value, 4) for key, value in pricing.hour_parts(device).items()},
        "break_even": [
            {
                "against": each.against,
                "api_blended": round(each.api_blended, 4),
                "utilization": round(each.utilization, 3),
                "possible": each.utilization <= 1,
            }
            for each in (break_even(api, workload, full) for api in _rivals(catalog, model))
        ],
    }
    if bill is not None:
        found = against_bill(bill.dollars, bill.tokens, costs, pricing.utilization)
        result["against_bill"] = {
            key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(found).items()
        }
    return result


def _source(device: Device) -> str:
    assert device.price is not None
    return device.price.source + (f" ({device.price.date})" if device.price.date else "")


def _rivals(catalog: Catalog, model: str) -> list[ApiPrice]:
    """The APIs whose model has the most similar name, at most four; another size counts against it."""
    size = re.search(r"\d+b", model.lower())

    def similarity(api: ApiPrice) -> float:
        other = re.search(r"\d+b", api.model)
        differs = size is not None and other is not None and size[0] != other[0]
        return difflib.SequenceMatcher(None, api.model, model.lower()).ratio() - differs

    return sorted(catalog.apis, key=similarity, reverse=True)[:_RIVALS]
