"""Whole simulations of deployments: the answer agrees with the cost and memory models it is made of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.unit.plan.simulate.build import load
from tokenmill.cli.main import main
from tokenmill.errors import UserError
from tokenmill.hardware.catalog import find_device
from tokenmill.hardware.weight_formats import find_format
from tokenmill.plan.cost.step_cost import StepCost
from tokenmill.plan.question.deployment import Deployment, room_for
from tokenmill.plan.question.model_names import built_in
from tokenmill.plan.simulate.engine_shape import shape_of
from tokenmill.plan.simulate.job import FleetOptions, Limits, simulate
from tokenmill.plan.simulate.report import _weighted_percentiles, simulation_series
from tokenmill.plan.simulate.workload import Workload

LLAMA = Deployment(built_in("llama-3.1-8b"), find_device("h100"))


@pytest.fixture(scope="module")
def cost() -> StepCost:
    return StepCost(LLAMA)


def test_the_pages_are_those_of_the_memory_model() -> None:
    shape = shape_of(LLAMA)
    assert shape.num_pages * 16 == room_for(LLAMA, 1).kv_tokens
    assert (shape.batch_tokens, shape.max_running, shape.context) == (8192, 256, 131072)
    gemma = shape_of(replace(LLAMA, model=built_in("gemma-3-27b"), tp=2))
    assert {group.kind for group in gemma.layout.groups} == {"full", "sliding"}


def test_stages_and_copies_share_out_the_pages() -> None:
    single = shape_of(replace(LLAMA, tp=1, pp=2))
    assert single.max_running == 128
    copied = replace(LLAMA, data_parallel=2, device=find_device("h200"))
    assert shape_of(copied).batch_tokens == 2 * 8192


def test_a_model_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(UserError, match="GiB for KV"):
        shape_of(replace(LLAMA, model=built_in("llama-3.1-70b")))
    with pytest.raises(UserError, match="context"):
        shape_of(LLAMA, context=10**6)


def test_recurrent_layers_need_state_not_pages() -> None:
    jamba = Deployment(built_in("jamba-v0.1"), find_device("h200"), find_format("fp8"))
    assert shape_of(jamba).num_pages > 1000


def test_a_lone_request_costs_what_the_cost_model_says(cost: StepCost) -> None:
    result = simulate(LLAMA, load((0.0, 2000, 3)), cost=cost)
    first = cost.step_ms([(2000, 0)], (0, 0.0))
    then = cost.step_ms((), (1, 2001.0)) + cost.step_ms((), (1, 2002.0))
    assert result.ttft.p50 == pytest.approx(first + cost.costs.request_ms)
    assert result.e2e.p50 == pytest.approx(first + then + cost.costs.request_ms)
    assert result.itl.p50 == pytest.approx(then / 2, rel=0.01)
    assert result.gpu_seconds.uncached_input == pytest.approx(first / 1e3)
    assert result.gpu_seconds.output == pytest.approx(then / 1e3)


def _steady(requests: int, gap_ms: float) -> Workload:
    return load(*[(gap_ms * number, 1024, 64) for number in range(requests)])


def test_goodput_counts_those_within_the_limits(cost: StepCost) -> None:
    result = simulate(LLAMA, _steady(40, 50.0), limits=Limits(1e6, 1e6), cost=cost)
    assert result.goodput is not None
    assert result.goodput.share == 1.0
    middle = simulate(LLAMA, _steady(40, 50.0), limits=Limits(result.ttft.p50, 0.0), cost=cost).goodput
    assert middle is not None
    assert 0.4 < middle.share < 0.7
    assert simulate(LLAMA, _steady(4, 50.0), cost=cost).goodput is None


def test_replicas_share_the_load_and_the_bill(cost: StepCost) -> None:
    one = simulate(LLAMA, _steady(60, 5.0), cost=cost)
    two = simulate(LLAMA, _steady(60, 5.0), FleetOptions(replicas=2), cost=cost)
    assert two.ttft.p90 < one.ttft.p90
    assert [each.requests for each in two.replicas] == [30, 30]
    assert two.output_tokens == one.output_tokens == 60 * 64
    for result in (one, two):
        spent = result.gpu_seconds
        assert spent.total == pytest.approx(len(result.replicas) * result.duration_s, rel=0.01)
        assert spent.uncached_input + spent.output + spent.idle == pytest.approx(spent.total)


def test_disaggregation_keeps_prompts_out_of_decodes(cost: StepCost) -> None:
    workload = load(*[(30.0 * number, 4096, 128) for number in range(40)])
    mixed = simulate(LLAMA, workload, FleetOptions(replicas=2), cost=cost)
    split = simulate(LLAMA, workload, FleetOptions(prefill_replicas=1, decode_replicas=1), cost=cost)
    slow = simulate(LLAMA, workload, FleetOptions(prefill_replicas=1, decode_replicas=1, link_gb_s=0.5), cost=cost)
    assert split.itl.p99 < mixed.itl.p99
    assert slow.e2e.p50 > split.e2e.p50
    assert slow.ttft.p50 == pytest.approx(split.ttft.p50)


def test_series_are_columns_of_equal_length(cost: StepCost) -> None:
    series = simulation_series(simulate(LLAMA, _steady(50, 20.0), cost=cost))
    assert len({len(series[name]) for name in ("seconds", "running", "waiting", "kv_use", "replicas")}) == 1
    assert len(series["arrival_seconds"]) == len(series["ttft_ms"]) == 50
    assert series["seconds"] == sorted(series["seconds"])


def test_weighted_percentiles_are_those_of_the_repeated_values() -> None:
    values, counts = [5.0, 1.0, 3.0], [10, 80, 10]
    found = _weighted_percentiles(values, counts)
    repeated = np.repeat(values, counts)
    assert found.mean == pytest.approx(repeated.mean())
    assert (found.p50, found.p90, found.p99) == (1.0, 3.0, 5.0)


@pytest.mark.parametrize(
    "options",
    [{"replicas": 0}, {"prefill_replicas": 1}, {"decode_replicas": 2}, {"link_gb_s": -1.0}],
)
def test_impossible_fleets_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UserError):
        FleetOptions(**options)  # type: ignore[arg-type]


def _printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["simulate", *arguments, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_the_verb_prints_the_contract(data_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(data_path / "traces" / "mooncake_conversation.jsonl.gz")
    found = _printed(capsys, "llama-3.1-8b", "--gpu", "h100x2", "--tp", "1", "--trace", trace, "--limit", "60")
    for name in ("ttft_ms", "itl_ms"):
        assert {"p50", "p90", "p99"} <= set(found[name])  # type: ignore[call-overload]
    assert found["requests"] == 60
    assert found["throughput_tok_s"] > 0  # type: ignore[operator]
    assert found["cache_hit_rate"] > 0  # type: ignore[operator]
    assert found["preemptions"] == 0
    assert len(found["replicas"]) == 2  # type: ignore[arg-type]


_LOAD = ["--rate", "1", "--input-len", "9", "--output-len", "9"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["llama-3.1-8b", "--gpu", "h1000", *_LOAD], "nearest"),
        (["llama-9-8b", "--gpu", "h100", *_LOAD], "nearest"),
        (["llama-3.1-8b", *_LOAD], "--gpu"),
        (["llama-3.1-8b", "--gpu", "h100", "--trace", "/absent"], "cannot read"),
        (["llama-3.1-8b", "--gpu", "h100x3", "--replicas", "2", *_LOAD], "devices"),
        (["llama-3.1-8b", "--gpu", "h100", "--router", "random", *_LOAD], "round_robin"),
        (["llama-3.1-8b", "--gpu", "h100", "--autoscale", "4", *_LOAD], "1:8"),
    ],
)
def test_bad_questions_end_with_exit_2(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) == 2
    assert problem in capsys.readouterr().err
