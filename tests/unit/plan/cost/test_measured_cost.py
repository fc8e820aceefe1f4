"""A cost fitted to timed steps, and what is kept of it between runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tokenmill.calibrate.job import calibrate
from tokenmill.calibrate.step_log import Scenario, log_steps, shortened, timed_step
from tokenmill.cli.main import main
from tokenmill.config import EngineConfig
from tokenmill.engine.llm import LLM
from tokenmill.errors import UserError
from tokenmill.plan.cost import this_machine
from tokenmill.plan.cost.measured_cost import MeasuredCost, TimedStep, fit_cost, fit_error
from tokenmill.plan.cost.step_cost import StepCost
from tokenmill.plan.cost.this_machine import MachineCalibration, ModelCalibration, load_calibration, save_calibration
from tokenmill.plan.question.deployment import Deployment
from tokenmill.plan.question.model_names import built_in
from tokenmill.plan.simulate.job import simulate_engine
from tokenmill.plan.simulate.measured import measured_engine
from tokenmill.plan.simulate.workload import Arrival, Workload
from tokenmill.types import Request, SamplingParams, ScheduledTokens, StepPlan

TRUTH = MeasuredCost((5.0, 2.0, 1.0, 0.5, 0.3, 0.7, 0.4, 30.0))


def _steps(noise: float, seed: int = 0, spikes: float = 0.0) -> list[TimedStep]:
    random = Random(seed)
    steps = []
    for _ in range(400):
        prefill = tuple((random.randint(2, 300), random.randint(0, 600)) for _ in range(random.choice((0, 0, 1, 2))))
        count = random.randint(0 if prefill else 1, 24)
        context = sum(random.randint(10, 900) for _ in range(count))
        ms = TRUTH.step_ms(prefill, (count, float(context))) * random.uniform(1 - noise, 1 + noise)
        steps.append(TimedStep(prefill, count, context, ms * (5.0 if random.random() < spikes else 1.0)))
    return steps


def test_a_linear_machine_is_recovered() -> None:
    assert fit_cost(_steps(0.0)).coefficients == pytest.approx(TRUTH.coefficients, rel=1e-3)


def test_noise_and_interruptions_do_little() -> None:
    fitted = fit_cost(_steps(0.1, spikes=0.05))
    quiet = _steps(0.0, seed=9)
    assert fit_error(fitted, quiet) < 0.04
    assert min(fitted.coefficients) >= 0


def test_serving_costs_by_the_sequence() -> None:
    step = ([(10, 0)], (3, 100.0))
    assert MeasuredCost(TRUTH.coefficients, 1.5).step_ms(*step) == pytest.approx(TRUTH.step_ms(*step) + 4 * 1.5)
    assert TRUTH.step_ms([], (0, 0.0)) == 0.0


def test_a_plan_is_counted_as_the_simulator_counts_it() -> None:
    request = Request("a", [1, 2, 3], SamplingParams())
    plan = StepPlan([ScheduledTokens(request, 0, 3, (), True), ScheduledTokens(request, 7, 1, (), True)])
    assert timed_step(plan, 4.0) == TimedStep(((3, 0),), 1, 8, 4.0)


@pytest.fixture
def calibration() -> MachineCalibration:
    model = ModelCalibration(
        TRUTH.coefficients, 1.2, 3.0, 0.02, (("full", 0, (0, 1)), ("sliding", 64, (2, 3))), 8, 500, 512, 16, 400
    )
    return MachineCalibration(
        "cpu", 2, 2, 8 << 30, "2026-01-02", 20.0, {"float32": 50.0, "q4_1": 90.0}, {"tiny": model}
    )


def test_what_was_measured_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calibration: MachineCalibration
) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path))
    assert load_calibration() is None
    with pytest.raises(UserError, match="--calibrate"):
        measured_engine("tiny")
    path = save_calibration(calibration)
    assert path.is_relative_to(tmp_path)
    engine = measured_engine("tiny")
    assert engine.cost == MeasuredCost(TRUTH.coefficients, 1.2)
    assert (engine.shape.num_pages, engine.shape.context, engine.request_ms) == (500, 400, 3.0)
    result = simulate_engine(engine, Workload("one", lambda: iter([Arrival(0, 0.0, 100, 2)])))
    assert result.ttft.p50 == pytest.approx(engine.cost.step_ms([(100, 0)], (0, 0.0)) + 3.0)
    with pytest.raises(UserError, match="tiny is"):
        measured_engine("other")
    assert load_calibration().device().bandwidth_gb_s == 20.0  # type: ignore[union-attr]
    path.write_text("{", encoding="utf-8")
    assert load_calibration() is None


def test_a_calibration_keeps_other_models(tmp_path: Path, calibration: MachineCalibration) -> None:
    both = replace(calibration, models={**calibration.models, "two": calibration.models["tiny"]})
    save_calibration(both, tmp_path / "file.json")
    found = load_calibration(tmp_path / "file.json")
    assert found is not None
    assert list(found.models) == ["tiny", "two"]


def test_a_record_without_models_keeps_what_they_reached(tmp_path: Path, calibration: MachineCalibration) -> None:
    measured = replace(calibration, models={"smollm2-135m": calibration.models["tiny"]}).device().measured_shares
    assert measured is not None
    save_calibration(replace(calibration, models={}, shares=measured), tmp_path / "file.json")
    found = load_calibration(tmp_path / "file.json")
    assert found is not None
    assert found.device().measured_shares == measured


def test_simulate_uses_the_measured_machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    calibration: MachineCalibration,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path))
    save_calibration(calibration)
    load = ["--concurrency", "2", "--input-len", "50", "--output-len", "8", "--limit", "10", "--json"]
    assert main(["simulate", "tiny", "--gpu", "this-machine", *load]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["output_tokens"], found["device"]) == (10, 80, "this-machine")
    assert found["basis"].startswith("measured")
    assert main(["simulate", "tiny", "--gpu", "this-machine", "--engine", "vllm", *load]) == 2
    assert "drop --engine" in capsys.readouterr().err


def test_other_models_rest_on_the_measured_roofs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calibration: MachineCalibration, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shares are anchored: by them a decode of the measured model takes about the measured time."""
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path))
    words = ["plan", "smollm2-135m", "--gpu", "this-machine", "--ttft", "0", "--itl", "0", "--json"]
    assert main(words) == 2
    assert "tokenmill plan smollm2-135m --calibrate" in capsys.readouterr().err
    save_calibration(replace(calibration, models={"smollm2-135m": calibration.models["tiny"]}))
    device = this_machine.calibrated_device()
    assert device.measured_shares is not None
    cost = StepCost(Deployment(built_in("smollm2-135m"), device, engine="tokenmill"))
    measured = TRUTH.step_ms([], (1, 128.0))
    assert cost.step_ms([], (1, 128.0)) == pytest.approx(measured, rel=0.35)
    prompt = [(256, 0)]  # quantized weights are multiplied as integers here, whatever a GPU would do
    assert cost.step_ms(prompt, (0, 0.0)) == pytest.approx(TRUTH.step_ms(prompt, (0, 0.0)), rel=0.35)
    assert main(words) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["device"], plan["engine"]) == ("this-machine", "tokenmill")
    assert "measured roofs of this machine" in plan["itl_ms"]["basis"]
    assert main([*words, "--engine", "llama.cpp"]) == 2
    assert "drop --engine" in capsys.readouterr().err
    load = ["--concurrency", "2", "--input-len", "50", "--output-len", "8", "--limit", "4", "--json"]
    assert main(["simulate", "llama-3.2-1b", "--gpu", "this-machine", *load]) == 0
    assert "tokenmill plan llama-3.2-1b --calibrate" in json.loads(capsys.readouterr().out)["basis"]


def test_calibration_times_the_real_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_path: Callable[[str], Path]
) -> None:
    """The numbers are this machine's; what must hold is that each part was measured and can be simulated."""
    model = str(model_path("stories15m"))
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path))
    report = calibrate(model, step_seconds=0.0, serving=False)
    assert report["steps_timed"] > 50
    assert {row["what"] for row in report["predicted_against_measured"]} >= {"prefill 128 tok/s", "decode x1 tok/s"}
    assert any("longer than the context" in each for each in report["skipped"])
    engine = measured_engine(model)
    assert engine.shape.layout.page_size == 8
    few, many = (engine.cost.step_ms([], (count, 100.0 * count)) for count in (1, 16))
    assert 0 < few < many
    assert min(report["bandwidth_gb_s"], *report["gflops"].values()) > 0


def test_long_probes_are_shortened_and_cut(model_path: Callable[[str], Path]) -> None:
    assert shortened(Scenario(8, 256, 16), 0.0, 1.0) == Scenario(8, 256, 16)
    assert shortened(Scenario(8, 256, 16), 0.001, 1.0) == Scenario(8, 32, 16)
    assert shortened(Scenario(8, 256, 16), 9.0, 1.0).prompt == 8
    with LLM(str(model_path("stories15m")), EngineConfig(prefix_caching=False)) as llm:
        log = log_steps(llm, 0.0, 0.0)  # no time at all: every scenario is stopped before its first step
        assert not log.steps
        assert sum("cut after 0 s" in each for each in log.skipped) >= 4
        assert not llm.parts.core.has_work
