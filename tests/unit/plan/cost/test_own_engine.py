"""Our own engine on a GPU: its constants against the step times measured in this repository."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any

import pytest

from tokenmill.hardware.catalog import find_device
from tokenmill.hardware.weight_formats import find_format
from tokenmill.plan.cost.step_cost import StepCost
from tokenmill.plan.question.deployment import Deployment
from tokenmill.plan.question.model_names import built_in

RUNS = tomllib.loads((resources.files("tokenmill.plan") / "data" / "own_engine.toml").read_text())["run"]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["weights"])
def test_step_times_agree_with_the_measured_ones(run: dict[str, Any]) -> None:
    weights = find_format(run["weights"])
    cost = StepCost(
        Deployment(built_in(run["model"]), find_device(run["device"]), weights, run["kv_bytes"], engine="tokenmill")
    )
    for batch, measured in run["decode_ms"].items():
        count = int(batch)
        assert cost.decode_ms(count, count * 640.0) == pytest.approx(measured, rel=0.15), (batch, run["weights"])
    tokens = 8192
    rate = 1e3 * tokens / cost.step_ms([(tokens, 0)], (0, 0.0))
    assert rate == pytest.approx(run["prefill_tok_s"], rel=0.25)
