"""A Grafana dashboard made from the metric table, so that a metric cannot be forgotten: `python -m` prints it.

    python -m tokenmill.serve.dashboard > docs/grafana.json

Counters are drawn as rates, histograms as percentiles, gauges as they are; ratios that users look for come first.
Knows Grafana's file format and METRICS, nothing of a running server.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenmill.engine.stats import MetricSpec
from tokenmill.serve.metrics import METRICS, PREFIX

_SELECTOR = '{model_name=~"$model"}'
_RATE = "[$__rate_interval]"
_WIDTH, _HEIGHT, _ROW_HEIGHT = 8, 8, 1
_ORDER = ("Health", "Models", "Throughput", "Latency", "Queue", "KV cache", "KV tiers", "Device", "Traffic", "Cost")
_PERCENTILES = (50, 90, 99)
_SOURCE = {"type": "prometheus", "uid": "${source}"}


def dashboard() -> dict[str, Any]:
    return {
        "title": "tokenmill",
        "uid": "tokenmill",
        "tags": ["tokenmill", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "panels": _panels(),
    }


def render() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


def _variables() -> list[dict[str, Any]]:
    query = f"label_values({PREFIX}engine_up, model_name)"
    return [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "model",
            "label": "Model",
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": query, "refId": "model"},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def _panels() -> list[dict[str, Any]]:
    """Row by row, three panels wide, in the order that helps a person on call."""
    groups = sorted({spec.panel for spec in METRICS}, key=_rank)
    panels: list[dict[str, Any]] = []
    top = 0
    for group in groups:
        panels.append(
            _place({"type": "row", "title": group, "collapsed": False, "panels": []}, 0, top, 24, _ROW_HEIGHT)
        )
        top += _ROW_HEIGHT
        drawn = [_panel(spec) for spec in METRICS if spec.panel == group]
        if group == "KV cache":
            drawn.insert(0, _hit_ratio())
        for number, panel in enumerate(drawn):
            row, column = divmod(number, 24 // _WIDTH)
            panels.append(_place(panel, column * _WIDTH, top + row * _HEIGHT, _WIDTH, _HEIGHT))
        top += -(-len(drawn) // (24 // _WIDTH)) * _HEIGHT
    return [{"id": number, **panel} for number, panel in enumerate(panels, 1)]


def _rank(group: str) -> tuple[int, str]:
    return (_ORDER.index(group) if group in _ORDER else len(_ORDER), group)


def _panel(spec: MetricSpec) -> dict[str, Any]:
    match spec.kind:
        case "histogram":
            buckets = f"sum by (le) (rate({PREFIX}{spec.name}_bucket{_SELECTOR}{_RATE}))"
            targets = [(f"histogram_quantile({each / 100:g}, {buckets})", f"p{each}") for each in _PERCENTILES]
            unit = spec.unit
        case "counter":
            by = f" by ({', '.join(spec.labels)})" if spec.labels else ""
            legend = " ".join(f"{{{{{label}}}}}" for label in spec.labels) or spec.name.replace("_", " ")
            targets = [(f"sum{by} (rate({PREFIX}{spec.name}_total{_SELECTOR}{_RATE}))", legend)]
            unit = "cps"
        case _:
            legend = " ".join(["{{instance}}", "{{model_name}}", *(f"{{{{{label}}}}}" for label in spec.labels)])
            targets = [(f"{PREFIX}{spec.name}{_SELECTOR}", legend)]
            unit = spec.unit
    return _series(_title(spec), spec.help, targets, unit)


def _hit_ratio() -> dict[str, Any]:
    hits, queries = (f"sum(rate({PREFIX}prefix_cache_{name}_total{_SELECTOR}{_RATE}))" for name in ("hits", "queries"))
    return _series(
        "Prefix cache hit ratio", "Share of prompt tokens found.", [(f"{hits} / {queries}", "hits")], "percentunit"
    )


def _series(title: str, description: str, targets: list[tuple[str, str]], unit: str) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": title,
        "description": description,
        "datasource": _SOURCE,
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, "custom": {"lineWidth": 2, "fillOpacity": 8, "showPoints": "never"}},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": expression, "legendFormat": legend, "datasource": _SOURCE}
            for number, (expression, legend) in enumerate(targets)
        ],
    }


def _place(panel: dict[str, Any], left: int, top: int, width: int, height: int) -> dict[str, Any]:
    return {**panel, "gridPos": {"x": left, "y": top, "w": width, "h": height}}


def _title(spec: MetricSpec) -> str:
    text = re.sub(r"_(seconds|ratio|bytes|watts|celsius)$", "", spec.name).replace("_", " ")
    for short in ("ttft", "itl", "kv", "http", "e2e", "gpu"):
        text = re.sub(rf"\b{short}\b", short.upper(), text)
    return text[0].upper() + text[1:] + (" per second" if spec.kind == "counter" else "")


if __name__ == "__main__":
    print(render(), end="")
