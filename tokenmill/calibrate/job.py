"""`tokenmill plan --calibrate`: two minutes of measurements that anchor the planner on this machine, or on its GPU.

Roofs measured with our kernels, every step of a short engine run, and a short served run; one step cost is fitted to
the engine run, another to the steps of the server, with what shares its cores. Compares predicted with measured and
stores the result (plan/cost/this_machine.py). Called by the command line.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from tokenmill.bench.serve import Measurement
from tokenmill.bench.serve_datasets import load_items
from tokenmill.bench.serve_job import ServeJob
from tokenmill.calibrate.gpu_probe import GpuRoofs, find_gpu, probe_gpu
from tokenmill.calibrate.machine_probe import product_gflops, read_bandwidth_gb_s
from tokenmill.calibrate.served_probe import measured, started_server
from tokenmill.calibrate.step_log import log_steps
from tokenmill.checkpoint.sources.cache import cache_root
from tokenmill.config import EngineConfig
from tokenmill.engine.llm import LLM
from tokenmill.hardware.machine import detect_machine
from tokenmill.kernels import cpu
from tokenmill.log import get_logger
from tokenmill.plan.cost.measured_cost import TimedStep, fit_cost, fit_error
from tokenmill.plan.cost.this_machine import MachineCalibration, ModelCalibration, load_calibration, save_calibration
from tokenmill.plan.simulate.job import simulate_engine
from tokenmill.plan.simulate.logged_server import read_server
from tokenmill.plan.simulate.measured import calibrated_engine
from tokenmill.plan.simulate.report import Simulation
from tokenmill.plan.simulate.workload import Arrival, Workload

_STEP_SECONDS = 40.0
_PROBE_SECONDS = 8.0  # of one scenario: a slow machine must not take ten minutes
_SERVED_SECONDS = 20.0
_SINGLE_REQUESTS = 5
_LEAST_SERVED_STEPS = 200
_WIDE_USERS = 32
_DEFAULT_MODEL = "smollm2"
_MADE_UP = {  # Llama-3.2-1B's shape
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_CLOSED_LOOPS = (
    (8, 128, 48),
    (4, 64, 24),
    (2, 32, 8),
)  # users, tokens in, tokens out: the first that is fast enough is used
_LOG = get_logger(__name__)


def calibrate(model: str = "", step_seconds: float = _STEP_SECONDS, serving: bool = True) -> dict[str, Any]:
    """Measure, fit, store; the report compares prediction and measurement. Without `serving` only the engine. No
    `model`: smollm2, or on a GPU one with made-up weights."""
    gpu = probe_gpu() if find_gpu() else None
    made_up = not model and gpu is not None
    model = model or (str(made_up_model()) if made_up else _DEFAULT_MODEL)
    options = EngineConfig(prefix_caching=False, load_format="dummy" if made_up else "auto")
    with LLM(model, options) as llm:
        on_gpu = llm.parts.config.device == "cuda"
        log = log_steps(llm, step_seconds, _PROBE_SECONDS)
        steps, skipped = log.steps, log.skipped
        cost = fit_cost(steps)
        measured = _of_engine(llm, cost.coefficients, fit_error(cost, steps))
        vocabulary = llm.parts.description.vocab_size
    report: dict[str, Any] = {"predicted_against_measured": _compare_steps(steps, measured)}
    if serving:
        measured, served, left_out = _with_serving(model, measured, vocabulary, made_up)
        report["predicted_against_measured"] += served
        skipped += left_out
    if gpu is not None:
        skipped += gpu.skipped
    for each in skipped:
        _LOG.warning("not measured in full: %s", each)
    report["skipped"] = skipped
    old = load_calibration()
    calibration = machine_calibration(gpu if on_gpu else None, {**(old.models if old else {}), model: measured})
    path = save_calibration(calibration)
    summary = {key: value for key, value in asdict(calibration).items() if key not in ("models", "gpu_products")}
    fitted = {key: value for key, value in asdict(measured).items() if key != "groups"}
    products = [asdict(each) for each in gpu.products] if gpu else []
    return {
        "model": model,
        **summary,
        "products": products,
        "steps_timed": len(steps),
        "engine": fitted,
        **report,
        "file": str(path),
    }


def machine_calibration(gpu: GpuRoofs | None, models: dict[str, ModelCalibration]) -> MachineCalibration:
    """The record of this machine: the roofs of its GPU, or those of its cores."""
    machine = detect_machine()
    return MachineCalibration(
        cpu=machine.cpu,
        cores=machine.cores,
        threads=cpu.num_threads(),
        memory_bytes=machine.memory_bytes,
        date=_today(),
        bandwidth_gb_s=gpu.bandwidth_gb_s if gpu else read_bandwidth_gb_s(),
        gflops=gpu.gflops() if gpu else product_gflops(),
        models=models,
        gpu=gpu.name if gpu else "",
        gpu_memory_bytes=gpu.memory_bytes if gpu else 0,
        gpu_products=tuple(asdict(each) for each in gpu.products) if gpu else (),
        launch_us=gpu.launch_us if gpu else 0.0,
    )


def made_up_model() -> Path:
    """A folder with the shape of a dense model of 1.2 billion parameters; its weights are made up at load."""
    folder = cache_root() / "calibration" / "made-up-1b"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_MADE_UP), encoding="utf-8")
    return folder


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


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
        date=_today(),
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
    model: str, calibration: ModelCalibration, vocabulary: int, made_up: bool = False
) -> tuple[ModelCalibration, list[dict[str, Any]], list[str]]:
    """A step cost fitted to the steps of the server while it and its clients share this machine, and what it adds to
    the first token of a single request. Also the comparison, and the loads that were left out."""
    job, left_out = _closed_loop_job(calibration, vocabulary)
    if job is None:
        return calibration, [], left_out
    single = _job(vocabulary, _SINGLE_REQUESTS, 1, job.random_input_len // 2, 8)
    wide = _wide_job(job, calibration)
    dummy = ("--load-format", "dummy") if made_up else ()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with started_server(model, "--no-prefix-caching", "--traffic-log", str(log), *dummy) as url:
            alone = measured(replace(single, base_url=url, num_warmups=1))
            if wide is not None:
                measured(replace(wide, base_url=url))
            busy = measured(replace(job, base_url=url))
        steps = [each.step for each in read_server(log).steps]
    if len(steps) >= _LEAST_SERVED_STEPS:
        calibration = replace(calibration, served_coefficients=fit_cost(steps, whole=True).coefficients)
    else:
        left_out.append(f"steps of the server: {len(steps)} were logged, {_LEAST_SERVED_STEPS} are needed")
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


def _wide_job(job: ServeJob, calibration: ModelCalibration) -> ServeJob | None:
    """Many short requests at once, so that large batches are in the fit too; None where a round takes too long."""
    users = min(_WIDE_USERS, calibration.max_running)
    lengths = max(8, job.random_input_len // 2), max(8, job.random_output_len // 2)
    wide = _job(job.vocab_size, users, users, *lengths)
    one_round = simulate_engine(calibrated_engine(calibration), closed_loop(wide)).duration_s
    if users <= job.max_concurrency or 2 * one_round > _SERVED_SECONDS:
        return None
    return replace(wide, num_prompts=users * min(8, int(_SERVED_SECONDS / one_round)))


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
