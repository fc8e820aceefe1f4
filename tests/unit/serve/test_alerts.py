"""The alert rules of docs/: well-formed, and of metrics and labels that a server has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tokenmill.serve.metrics import METRICS, PREFIX

_FILE = Path(__file__).parents[3] / "docs" / "prometheus_alerts.yml"
_SUFFIX = {"counter": "_total", "gauge": "", "histogram": "_bucket"}
_SERIES = {PREFIX + spec.name + _SUFFIX[spec.kind]: {"model_name", "instance", *spec.labels} for spec in METRICS}
_USED = re.compile(r"\b(tokenmill_\w+)(?:\{([^}]*)\})?")


def _rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(_FILE.read_text())["groups"]
    assert len({group["name"] for group in groups}) == len(groups)
    return [rule for group in groups for rule in group["rules"]]


def test_every_rule_is_whole() -> None:
    rules = _rules()
    assert len({rule["alert"] for rule in rules}) == len(rules) > 8
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert re.fullmatch(r"\d+[smhd]", rule.get("for", "1m"))
        for opening, closing in ("()", "[]", "{}"):
            assert rule["expr"].count(opening) == rule["expr"].count(closing), rule["alert"]


def test_rules_ask_for_metrics_and_labels_that_exist() -> None:
    for rule in _rules():
        used = _USED.findall(rule["expr"])
        assert used, rule["alert"]
        by = {label.strip() for labels in re.findall(r"by \(([^)]*)\)", rule["expr"]) for label in labels.split(",")}
        for name, selector in used:
            assert name in _SERIES, name
            chosen = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
            assert chosen | (by - {"le"}) <= _SERIES[name], (rule["alert"], name)
            assert ("le" in by) == name.endswith("_bucket")
        shown = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        # without an aggregation a series keeps all labels
        assert shown <= (by or set.union(*(_SERIES[name] for name, _ in used))), rule["alert"]
