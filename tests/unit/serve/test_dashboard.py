"""The dashboard file is the one the metric table gives, and asks only for series that the server has."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenmill.serve.dashboard import dashboard, render
from tokenmill.serve.metrics import METRICS, PREFIX, Metrics

_FILE = Path(__file__).parents[3] / "docs" / "grafana.json"


def test_the_committed_file_is_up_to_date() -> None:
    assert _FILE.read_text() == render(), "run: python -m tokenmill.serve.dashboard > docs/grafana.json"


def test_every_metric_is_drawn_and_every_series_exists() -> None:
    expressions = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    asked = {name for text in expressions for name in re.findall(rf"{PREFIX}\w+", text)}
    metrics = Metrics("m")
    for spec in METRICS:
        if spec.labels and spec.name != "lora_requests":
            metrics.add(spec.name, 1.0, *("x" for _ in spec.labels))
    served = {re.split(r"[{ ]", line)[0] for line in metrics.render().decode().splitlines() if not line.startswith("#")}
    assert asked <= served
    for spec in METRICS:
        assert any(re.search(rf"\b{PREFIX}{spec.name}(_total|_bucket)?\{{", text) for text in expressions), spec.name


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    panels = json.loads(render())["panels"]
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)
