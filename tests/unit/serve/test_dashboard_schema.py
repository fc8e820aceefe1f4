"""The dashboard and the alert rules as Grafana and Prometheus read them: by Grafana's own schema of a dashboard (its
Foundation SDK drops what the schema does not have) and by a PromQL parser, against the series that a server exposes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tokenmill.serve.dashboard import render
from tokenmill.serve.metrics import METRICS, Metrics

_ALERTS = Path(__file__).parents[3] / "docs" / "prometheus_alerts.yml"
_ADDED = {"instance", "job"}  # by Prometheus


def _lost(written: Any, read: Any, place: str = "") -> Iterator[str]:
    """What `read` does not have of `written`, or has otherwise."""
    if isinstance(written, dict) and isinstance(read, dict):
        for name, value in written.items():
            yield from _lost(value, read[name], f"{place}.{name}") if name in read else [f"{place}.{name}"]
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for number, (one, other) in enumerate(zip(written, read, strict=True)):
            yield from _lost(one, other, f"{place}[{number}]")
    elif written != read:
        yield f"{place}: {written!r} became {read!r}"


def test_grafana_reads_every_field_of_the_board() -> None:
    dashboard = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="part of the extra dev")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models import timeseries

    register_default_plugins()
    written = json.loads(render())
    read = json.loads(JSONEncoder().encode(dashboard.Dashboard.from_json(written)))
    assert list(_lost(written, read)) == []
    for panel in written["panels"]:
        if panel["type"] == "timeseries":  # what a plugin defines itself is checked by its own part of the schema
            for model, part in (
                (timeseries.Options, panel["options"]),
                (timeseries.FieldConfig, panel["fieldConfig"]["defaults"]["custom"]),
            ):
                assert list(_lost(part, json.loads(JSONEncoder().encode(model.from_json(part))))) == []


def _served() -> dict[str, set[str]]:
    """Every series of a server and the labels it has."""
    from prometheus_client.parser import text_string_to_metric_families

    metrics = Metrics("m")
    for spec in METRICS:
        if spec.labels and spec.name != "lora_requests":
            metrics.add(spec.name, 1.0, *("x" for _ in spec.labels))
    families = text_string_to_metric_families(metrics.render().decode())
    return {each.name: set(each.labels) for family in families for each in family.samples}


def _expressions() -> list[str]:
    shown = [target["expr"] for panel in json.loads(render())["panels"] for target in panel.get("targets", ())]
    groups = yaml.safe_load(_ALERTS.read_text())["groups"]
    return shown + [rule["expr"] for group in groups for rule in group["rules"]]


def test_every_query_parses_and_asks_for_what_is_served() -> None:
    promql = pytest.importorskip("promql_parser", reason="part of the extra dev")
    served = _served()
    for text in _expressions():
        expression = promql.parse(text.replace("$__rate_interval", "5m"))
        nodes: list[Any] = []
        promql.walk(expression, nodes.append)
        selectors = [node for node in nodes if isinstance(node, promql.VectorSelector)]
        assert selectors, text
        for selector in selectors:
            assert selector.name in served, selector.name
            chosen = {matcher.name for matcher in selector.matchers.matchers}
            assert chosen <= served[selector.name] | _ADDED, (text, chosen)
        labels = set.union(*(served[selector.name] for selector in selectors)) | _ADDED
        for node in nodes:
            if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
                assert set(node.modifier.labels) <= labels, text
