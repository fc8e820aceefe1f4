"""The statistics of several engines of one model as one record. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from tokenmill.engine.stats import EngineStats, TierStats, metrics_of

_COUNTERS = tuple(name for name, spec in metrics_of(EngineStats) if spec.kind == "counter")


def merged_stats(records: Sequence[EngineStats]) -> EngineStats:
    """Numbers are added up, shares are means by pages; what is true of all of them is true."""
    found = EngineStats()
    for each in fields(EngineStats):
        values = [getattr(record, each.name) for record in records]
        if isinstance(values[0], bool):
            setattr(found, each.name, all(values))
        elif isinstance(values[0], int | float):
            setattr(found, each.name, sum(values))
        elif each.name != "tiers":
            setattr(found, each.name, [item for value in values for item in value])
    pages = max(1, found.num_pages)
    for name in ("kv_usage", "kv_waste", "kv_padding"):
        setattr(found, name, sum(getattr(each, name) * each.num_pages for each in records) / pages)
    found.tiers = _merged_tiers([tier for record in records for tier in record.tiers])
    return found


def _merged_tiers(tiers: Sequence[TierStats]) -> list[TierStats]:
    by_name: dict[str, TierStats] = {}
    for tier in tiers:
        known = by_name.get(tier.name)
        by_name[tier.name] = replace(tier, rejected=dict(tier.rejected)) if known is None else _both(known, tier)
    return list(by_name.values())


def _both(one: TierStats, other: TierStats) -> TierStats:
    values: dict[str, Any] = {}
    for each in fields(TierStats):
        a, b = getattr(one, each.name), getattr(other, each.name)
        if isinstance(a, dict):
            values[each.name] = {key: a.get(key, 0) + b.get(key, 0) for key in {*a, *b}}
        else:
            values[each.name] = a if isinstance(a, str) else a + b
    return TierStats(**{**values, "up": min(one.up, other.up)})


def since(now: EngineStats, before: EngineStats) -> EngineStats:
    """`now` with its counters counted from those of `before`."""
    changed = {name: max(0, getattr(now, name) - getattr(before, name)) for name in _COUNTERS}
    return replace(now, **changed)
