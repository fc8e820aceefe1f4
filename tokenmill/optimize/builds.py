"""Making what a candidate needs: quantized weights by the quantization jobs, a draft head by training.

Forecasts the time before starting and refuses what would take longer than is left. The jobs' own gate is off: the loop
proves quality itself. Quantization in blocks resumes at the last finished one. Runs in a contender's process.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import asdict
from typing import Any

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.engine.draft_training import own_text, seen_layers, train_head
from tokenmill.engine.llm import LLM
from tokenmill.errors import UserError
from tokenmill.optimize.artefacts import require_time
from tokenmill.optimize.contender_messages import BuildWeights, Built, TrainDrafter
from tokenmill.quantize.finish import GateRequest
from tokenmill.quantize.forecast import operations_per_second
from tokenmill.quantize.gguf_job import GGUFJob, run_gguf_job
from tokenmill.quantize.job import PreparedJob, QuantizeJob, prepare, run_job
from tokenmill.quantize.recipe import RecipeRequest
from tokenmill.quantize.workspace import Workspace
from tokenmill.runtime.observation.default_text import default_text
from tokenmill.runtime.speculation.training import TrainingPlan
from tokenmill.types import SamplingParams

_LAYER_FIELDS = ("name", "type_name", "relative_error")
_BATCH = 1024  # positions in a training step
_PROBE_TOKENS = 16


def build_weights(order: BuildWeights) -> Built:
    """Raises NotEnoughTimeError where the forecast is longer than `order.seconds`."""
    gate = GateRequest(enabled=False, threads=order.threads)
    if order.mix:
        method = "imatrix" if order.importance else "rtn"
        job = GGUFJob(
            str(order.source), order.path, method, order.mix, None, None, order.samples, order.length, order.device
        )
        return _built(run_gguf_job(job, gate, 0, lambda *_: None), 0.0)
    prepared = prepare(_quantize_job(order, gate))
    require_time("quantizing", prepared.forecast.seconds * order.slowdown, order.seconds)
    _drop_other_work(prepared)
    return _built(asdict(run_job(prepared)), prepared.forecast.seconds)


def _quantize_job(order: BuildWeights, gate: GateRequest) -> QuantizeJob:
    return QuantizeJob(
        model=str(order.source),
        out=order.path,
        recipe=RecipeRequest(order.method, order.bits),
        calibration_samples=order.samples,
        calibration_length=order.length,
        threads=order.threads,
        device=order.device,
        gate=gate,
    )


def _drop_other_work(prepared: PreparedJob) -> None:
    """Finished blocks are taken up again; those of another torch or another source file are not."""
    try:
        Workspace(prepared.job.out, prepared.key)
    except UserError:
        shutil.rmtree(prepared.job.out.with_name(prepared.job.out.name + ".partial"))


def _built(report: dict[str, Any], forecast: float) -> Built:
    layers = [{key: layer[key] for key in _LAYER_FIELDS} for layer in report["layers"]]
    return Built(report["seconds"], forecast, report["bits_per_weight"], layers)


def train_drafter(order: TrainDrafter) -> Built:
    """Raises NotEnoughTimeError where the forecast, from a few generated tokens and this machine's speed, is longer
    than `order.seconds`."""
    began = time.monotonic()
    plan = TrainingPlan(kind=order.kind, steps=order.steps, batch=_BATCH, seed=order.config.seed)
    with LLM(str(order.model), order.config, tensors=True) as llm:
        window = llm.parts.config.context - 1
        forecast = forecast_training(llm, plan, order.tokens)
        require_time("training a drafter", forecast * order.slowdown, order.seconds)
        text = default_text(8 * order.tokens)
        states = own_text(llm, text, order.tokens, window, seen_layers(llm, plan))
        partial = order.path.with_name(order.path.name + ".partial")
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(partial)
        train_head(llm, states, plan, partial)
        partial.rename(order.path)
    return Built(time.monotonic() - began, forecast)


def forecast_training(llm: LLM, plan: TrainingPlan, tokens: int) -> float:
    """Seconds: half of the tokens are generated, all are read, then the head learns from batches of them."""
    count = min(llm.parts.config.concurrency, 8)
    prompts = [[1 + number] * 8 for number in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=_PROBE_TOKENS, ignore_eos=True)
    llm.generate(prompts, params)
    began = time.monotonic()
    llm.generate(prompts, params)
    per_token = (time.monotonic() - began) / (count * _PROBE_TOKENS)
    speed = operations_per_second(llm.parts.runtime.model.device)
    return tokens * per_token / 2 + training_operations(llm.parts.description, plan) / speed


def training_operations(description: ModelDescription, plan: TrainingPlan) -> float:
    """Forward and backward: each of `depth` tokens goes through the head's layer and the model's vocabulary."""
    d = description
    width = plan.width or 2 * d.hidden_size
    weights = 3 * d.hidden_size * width + 4 * d.hidden_size**2 + d.hidden_size * d.vocab_size
    return 6.0 * weights * plan.batch * plan.steps * plan.depth
