"""`tokenmill plan --calibrate`: two minutes of measurements that anchor the planner on this machine.

Roofs measured with our kernels, every step of a short engine run, and a short served run; a step cost is fitted to the
engine run, the served run shows what serving adds. Compares predicted with measured and stores the result
(plan/cost/this_machine.py). Called by the command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any

from tokenmill.bench.serve import Measurement
from tokenmill.bench.serve_datasets import load_items
from tokenmill.bench.serve_job import ServeJob
from tokenmill.calibrate.machine_probe import product_gflops, read_bandwidth_gb_s
from tokenmill.calibrate.served_probe import measured, started_server
from tokenmill.calibrate.step_log import log_steps
from tokenmill.config import EngineConfig
from tokenmill.engine.llm import LLM
from tokenmill.hardware.machine import detect_machine
from tokenmill.kernels import cpu
from tokenmill.log import get_logger
from tokenmill.plan.cost.measured_cost import TimedStep, fit_cost, fit_error
from tokenmill.plan.cost.this_machine import MachineCalibration, ModelCalibration, load_calibration, save_calibration
from tokenmill.plan.simulate.job import simulate_engine
from tokenmill.plan.simulate.measured import calibrated_engine
from tokenmill.plan.simulate.report import Simulation
from tokenmill.plan.simulate.workload import Arrival, Workload

_STEP_SECONDS = 40.0
_PROBE_SECONDS = 8.0  # of one scenario: a slow machine must not take ten minutes
_SERVED_SECONDS = 20.0
_SINGLE_REQUESTS = 5
_CLOSED_LOOPS = (
    (8, 128, 48),
    (4, 64, 24),
    (2, 32, 8),
)  # users, tokens in, tokens out: the first that is fast enough is used
_LOG = get_logger(__name__)


def calibrate(model: str = "smollm2", step_seconds: float = _STEP_SECONDS, serving: bool = True) -> dict[str, Any]:
    """Measure, fit, store; the report compares prediction and measurement. Without `serving` only the engine."""
    bandwidth, gflops = read_bandwidth_gb_s(), product_gflops()
    with LLM(model, EngineConfig(prefix_caching=False)) as llm:
        log = log_steps(llm, step_seconds, _PROBE_SECONDS)
        steps, skipped = log.steps, log.skipped
        cost = fit_cost(steps)
        measured = _of_engine(llm, cost.coefficients, fit_error(cost, steps))
        vocabulary = llm.parts.description.vocab_size
    report: dict[str, Any] = {"predicted_against_measured": _compare_steps(steps, measured)}
    if serving:
        measured, served, left_out = _with_serving(model, measured, vocabulary)
        report["predicted_against_measured"] += served
        skipped += left_out
    for each in skipped:
        _LOG.warning("not measured in full: %s", each)
    report["skipped"] = skipped
    machine = detect_machine()
    old = load_calibration()
    calibration = MachineCalibration(
        cpu=machine.cpu,
        cores=machine.cores,
        threads=cpu.num_threads(),
        memory_bytes=machine.memory_bytes,
        date=datetime.now(UTC).date().isoformat(),
        bandwidth_gb_s=bandwidth,
        gflops=gflops,
        models={**(old.models if old else {}), model: measured},
    )
    path = save_calibration(calibration)
    summary = {key: value for key, value in asdict(calibration).items() if key != "models"}
    fitted = {key: value for key, value in asdict(measured).items() if key != "groups"}
    return {"model": model, **summary, "steps_timed": len(steps), "engine": fitted, **report, "file": str(path)}


def _of_engine(llm: LLM, coefficients: tuple[float, ...], error: float) -> ModelCalibration:
    runtime, config = llm.parts.runtime, llm.parts.config
    groups = tuple((group.kind, group.window, group.layers) for group in runtime.layout.groups)
    return ModelCalibration(
        coefficients=coefficients,
        token_ms=0.0,
        request_ms=0.0,
        fit_error=error,
        groups=groups,
        page_size=config.page_size,
        num_pages=runtime.budget.num_pages,
        batch_tokens=config.batch_tokens,
        max_running=config.concurrency,
        context=config.context,
    )


def _compare_steps(steps: list[TimedStep], calibration: ModelCalibration) -> list[dict[str, Any]]:
    """Medians of similar steps, as rates: prompts of two lengths alone, decodes of three batch sizes."""
    cost = calibration.cost
    kinds = [(f"prefill {length} tok/s", length, 0) for length in (128, 512)]
    kinds += [(f"decode x{batch} tok/s", 0, batch) for batch in (1, 4, 16)]
    rows = []
    for name, length, batch in kinds:
        similar = [
            step
            for step in steps
            if (
                step.count == batch and not step.prefill if batch else step.prefill == ((length, 0),) and not step.count
            )
        ]
        if similar:
            measured_ms = median(step.ms for step in similar)
            context = median(step.context for step in similar)
            predicted_ms = cost.step_ms(similar[0].prefill, (batch, float(context)))
            tokens = 1e3 * (length or batch)
            rows.append(compared(name, tokens / predicted_ms, tokens / measured_ms))
    return rows


def compared(name: str, predicted: float, measured_value: float) -> dict[str, Any]:
    return {"what": name, "predicted": predicted, "measured": measured_value, "ratio": predicted / measured_value}


def _with_serving(
    model: str, calibration: ModelCalibration, vocabulary: int
) -> tuple[ModelCalibration, list[dict[str, Any]], list[str]]:
    """The server's overhead per token while several stream, and on the first token of a single request. Also the
    comparison, and the loads that were left out."""
    job, left_out = _closed_loop_job(calibration, vocabulary)
    if job is None:
        return calibration, [], left_out
    single = _job(vocabulary, _SINGLE_REQUESTS, 1, job.random_input_len // 2, 8)
    with started_server(model, "--no-prefix-caching") as url:
        alone = measured(replace(single, base_url=url, num_warmups=1))
        busy = measured(replace(job, base_url=url))
    offline = simulate_engine(calibrated_engine(calibration), closed_loop(job))
    extra_ms = 1e3 * (busy.ended - busy.began - offline.duration_s)
    calibration = replace(calibration, token_ms=max(0.0, extra_ms / offline.output_tokens))
    quiet = simulate_engine(calibrated_engine(calibration), closed_loop(single)).ttft.p50
    request_ms = median(1e3 * (each.first - each.sent) for each in alone.samples) - quiet
    calibration = replace(calibration, request_ms=max(0.0, request_ms))
    return (
        calibration,
        compare_runs("served", simulate_engine(calibrated_engine(calibration), closed_loop(job)), busy),
        left_out,
    )


def _closed_loop_job(calibration: ModelCalibration, vocabulary: int) -> tuple[ServeJob | None, list[str]]:
    """The largest closed loop of which at least two rounds fit into the time by the fitted cost, with as many rounds as
    fit; and the larger ones that were left out."""
    left_out: list[str] = []
    for users, tokens_in, tokens_out in _CLOSED_LOOPS:
        job = _job(vocabulary, users, users, tokens_in, tokens_out)
        one_round = simulate_engine(calibrated_engine(calibration), closed_loop(job)).duration_s
        if 2 * one_round <= _SERVED_SECONDS:
            rounds = min(16, int(_SERVED_SECONDS / one_round))
            return replace(job, num_prompts=users * rounds), left_out
        left_out.append(
            f"serving {users} users of {tokens_in} + {tokens_out} tokens: left out, would take {2 * one_round:.0f} s"
        )
    return None, left_out


def _job(vocabulary: int, requests: int, users: int, input_len: int, output_len: int) -> ServeJob:
    return ServeJob(
        num_prompts=requests,
        max_concurrency=users,
        random_input_len=input_len,
        random_output_len=output_len,
        random_range_ratio=0.5,  # equal lengths would synchronize the users
        vocab_size=vocabulary,
        ignore_eos=True,
    )


def closed_loop(job: ServeJob) -> Workload:
    """The same requests as a closed loop, for the simulator."""
    items = load_items(job)

    def arrivals() -> Iterator[Arrival]:
        for number, item in enumerate(items):
            yield Arrival(number, 0.0, item.prompt_len, item.output_len)

    return Workload("closed loop", arrivals, users=job.max_concurrency)


def compare_runs(name: str, simulation: Simulation, measurement: Measurement) -> list[dict[str, Any]]:
    samples = measurement.samples
    tokens = sum(sample.output_tokens for sample in samples) / (measurement.ended - measurement.began)
    ttft = median(1e3 * (sample.first - sample.intended) for sample in samples)  # arrivals, as the simulator counts
    return [
        compared(f"{name} output tok/s", simulation.throughput_tok_s, tokens),
        compared(f"{name} TTFT p50 ms", simulation.ttft.p50, ttft),
    ]
