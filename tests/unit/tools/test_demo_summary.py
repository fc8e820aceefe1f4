"""The closing lines of the demo, from the results that `optimize` writes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.optimize import outcomes
from tokenmill.optimize.outputs import plain
from tokenmill.optimize.results import Outcome
from tools.demo_summary import lines


def _lines(folder: Path, outcome: Outcome) -> list[str]:
    (folder / "results.json").write_text(json.dumps(plain(outcome)))
    return lines(folder)


def test_both_savings_and_what_the_source_was(tmp_path: Path) -> None:
    found = _lines(tmp_path, outcomes.cpu_without_objectives())
    assert found[0] == "smollm2, a source already quantized: Q4_0"
    assert found[1].startswith("  saving against today:       16.7% (11.5% to 21.5%)")
    assert found[2].startswith("  saving against unquantized: 60.0% (")
    assert found[3].endswith("+0.40% of perplexity")
    counts = [int(word) for word in found[4].replace(",", "").split() if word.isdigit()]
    assert counts[0] > counts[1] >= counts[2] >= 1, "tried, of those timed, of those proven"


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    found = _lines(tmp_path, outcomes.interrupted())
    assert found[0].endswith("in full precision: nothing cheaper")
    assert found[1].endswith("not measured")
    assert _lines(tmp_path, outcomes.quality_off())[3].endswith("not measured")
