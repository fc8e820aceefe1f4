"""What a plan takes from a trace: mean lengths, rate and burstiness."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenmill.plan.simulate.trace_facts import trace_facts
from tokenmill.plan.simulate.traces import open_trace


def test_a_regular_trace_is_not_bursty(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"arrival_s": 0.5 * i, "input_length": 100 + 2 * i, "output_length": 20} for i in range(11)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    facts = trace_facts(str(path), open_trace(str(path)))
    assert (facts.input_tokens, facts.output_tokens) == (110, 20)
    assert facts.rate == pytest.approx(2.0)
    assert facts.burstiness == pytest.approx(0.0, abs=1e-6)
