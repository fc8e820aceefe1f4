"""What a run of `optimize` works with, prepared from the job: checkpoint, traffic, search space, prediction.

Reads the checkpoint and asks the machine; measures only the kernels that predictions need. Called by job.py; the
output directory is written from it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.dummy import DummyCheckpoint
from tokenmill.checkpoint.gguf_writer import TensorSlot
from tokenmill.checkpoint.open import open_source
from tokenmill.checkpoint.sources import resolve
from tokenmill.checkpoint.sources.cache import cache_root
from tokenmill.checkpoint.tokenizer_files import tokenizer_of
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.evaluate.windows import read_text
from tokenmill.hardware.catalog import Device, load_catalog
from tokenmill.hardware.device_price import this_device
from tokenmill.hardware.machine import available_memory, detect_machine
from tokenmill.kernels.ggml_types import TYPES
from tokenmill.log import get_logger
from tokenmill.model.dummy_reader import matrix_shapes
from tokenmill.model.kvstore import KV_STORES
from tokenmill.optimize.arrivals import Arrivals
from tokenmill.optimize.artefacts import ArtefactCache
from tokenmill.optimize.candidates import STORED, chosen_names, parse_weights
from tokenmill.optimize.kernel_probe import KernelSpeed
from tokenmill.optimize.loop import Effort
from tokenmill.optimize.predict import Predictor, SlotsOf, Work, this_machine
from tokenmill.optimize.question import OptimizeJob
from tokenmill.optimize.space import (
    Space,
    batch_choices,
    drafter_choices,
    engine_options,
    fitting_tokens,
    float_weight_names,
    kv_choices,
    made_up_names,
    rounded_at_load,
    shares_prefixes,
    weight_names,
)
from tokenmill.optimize.store import Store
from tokenmill.optimize.traffic import Traffic, TrafficRequest, build_arrivals, build_traffic, concurrency_of
from tokenmill.plan.question.model_names import describe_for_planning
from tokenmill.plan.question.planned_model import PlannedModel
from tokenmill.quantize.calibration_text import built_in_held_out
from tokenmill.resolution import DEVICE_DEFAULTS

_log = get_logger(__name__)
_PLAIN_TYPES = ("F32", "F16", "BF16", "F64")
_SAMPLED_REQUESTS = 256  # of the traffic, to see what prompts share
_TIER_FOLDER = "kv-tier"
_SPEEDS = "kernel speeds"
_WAVES = 4  # requests per slot that are sent at once where no objective is given


@dataclass(slots=True)
class Setup:
    source: Path
    device: str
    artefacts: ArtefactCache
    traffic: Traffic
    arrivals: Arrivals
    engine: EngineConfig  # context and concurrency of the workload
    served: EngineConfig  # of a server, under arrivals: more requests at a time where nobody states how many
    effort: Effort
    text: str
    planned: PlannedModel | None
    space: Space
    source_quantized: bool


def prepare(job: OptimizeJob) -> Setup:
    source = resolve(job.model).path
    load_format = job.engine.load_format
    checkpoint = open_source(source, load_format)
    description = checkpoint.description
    device = chosen_device(job.device or job.engine.device or "")
    longest = job.engine.context or description.context_length
    request = replace(job.traffic, traffic_log=job.traffic_log) if job.traffic_log else job.traffic
    traffic = build_traffic(request, description.vocab_size, tokenizer_of(source, load_format)[0], longest, device)
    quantized = is_quantized(checkpoint)
    engine = workload_engine(replace(job.engine, device=device), traffic, concurrency_of(job.traffic, device), device)
    planned, served = _planned(source), engine
    if job.objectives and not job.traffic.concurrency:
        served = replace(engine, concurrency=DEVICE_DEFAULTS[device].concurrency)
    return Setup(
        source=source,
        device=device,
        artefacts=ArtefactCache(source, checkpoint, job.model, job.engine.threads or 0, device),
        traffic=traffic,
        arrivals=_arrivals(request, bool(job.objectives), description.vocab_size, engine),
        engine=engine,
        served=served,
        effort=job.effort,
        text=read_text(job.text) if job.text else built_in_held_out(),
        planned=planned,
        space=_space(job, checkpoint, traffic, engine, device, quantized, planned),
        source_quantized=quantized,
    )


def _arrivals(request: TrafficRequest, in_objective: bool, vocab_size: int, engine: EngineConfig) -> Arrivals:
    """The user's, where latency matters; else as many requests as keep every slot busy, all at once."""
    arrivals = build_arrivals(request, vocab_size, engine.decided("context"))
    return arrivals if in_objective else arrivals.at_once(_WAVES * engine.decided("concurrency"))


def chosen_device(asked: str) -> str:
    """ "cpu" or "cuda"; a GPU where one can be used and nothing else is asked for."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise UserError("no GPU can be used here", "leave --device out, or give --device cpu")
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def is_quantized(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint is itself quantized, judged by the types of its tensors."""
    types = {checkpoint.tensor(name).type_name for name in checkpoint.names()}
    return any(name.upper() not in _PLAIN_TYPES for name in types)


def workload_engine(engine: EngineConfig, traffic: Traffic, concurrency: int, device: str) -> EngineConfig:
    """The engine configuration that the workload needs."""
    engine = engine.fill("the longest request of the traffic", context=traffic.longest)
    return replace(engine, concurrency=concurrency).fill(
        "starting point of the search", batch_tokens=DEVICE_DEFAULTS[device].batch_tokens
    )


def _space(
    job: OptimizeJob,
    checkpoint: Checkpoint,
    traffic: Traffic,
    engine: EngineConfig,
    device: str,
    quantized: bool,
    planned: PlannedModel | None,
) -> Space:
    description = checkpoint.description
    asked = chosen_names(job.kv, list(KV_STORES), "KV cache dtype") if job.kv else []
    at_load = {} if job.candidates else rounded_at_load(device)
    known = made_up_names(at_load) if job.made_up else weight_names(device, quantized)
    weights = chosen_names(job.candidates, known, "weights")
    kv = kv_choices(device, description.kv_layers(), asked)
    requests = traffic.draw(_SAMPLED_REQUESTS, 0)
    prompts = [request.prompt_ids for request in requests]
    token_bytes = kv[0].bits / 8 * sum(layer.values_per_token for layer in description.kv_layers())
    working_set = int(token_bytes * sum(map(len, {tuple(prompt) for prompt in prompts})))
    together = traffic.input_tokens * engine.decided("concurrency")
    return Space(
        device=device,
        weights=weights,
        float_weights=[STORED] if job.made_up else float_weight_names(device, quantized),
        kv=kv,
        batch_tokens=batch_choices(
            device, together, bool(job.objectives), _fitting(job.objectives.shortest_gap_s, planned, device)
        ),
        drafters=[] if job.made_up else drafter_choices(device, description.num_layers),
        options=engine_options(
            device,
            engine.prefix_caching,
            shares_prefixes(prompts),
            working_set,
            engine.memory or available_memory() // 4,
            str(cache_root() / "optimize" / _TIER_FOLDER),
        ),
        calibrated=frozenset(name for name in weights if parse_weights(name).needs_calibration),
        by_blocks=frozenset(name for name in weights if parse_weights(name).method),
        rounded_at_load=at_load,
        stored=STORED if quantized or job.made_up else "",
    )


def _fitting(gap_s: float, planned: PlannedModel | None, device: str) -> int:
    """Tokens of a step within the objective for gaps; 0: none is stated, or the device's rate is not known. A CPU's
    default is small enough for its rate not to matter."""
    row = this_device(load_catalog(), detect_machine(), device) if device == "cuda" else None
    if not gap_s or planned is None or row is None:
        return 0
    return fitting_tokens(gap_s, planned.active_parameters, row.rate("bf16"))


def _planned(source: Path) -> PlannedModel | None:
    try:
        return describe_for_planning(source)
    except UserError as error:
        _log.warning("the planner does not know this model, everything is tried: %s", error)
        return None


def make_predictor(setup: Setup, store: Store) -> Predictor | None:
    """Kernel speeds that an earlier run measured are used again: a resumed run then tries in the same order."""
    if setup.planned is None:
        return None
    traffic, engine = setup.traffic, setup.engine
    work = Work(
        traffic.input_tokens,
        traffic.output_tokens,
        engine.decided("concurrency"),
        engine.decided("batch_tokens"),
        setup.device,
    )
    speeds = {
        kind: KernelSpeed(each["backend"], {int(rows): seconds for rows, seconds in each["seconds"].items()})
        for kind, each in (store.recall(_SPEEDS, setup.device) or {}).items()
    }
    checkpoint = setup.artefacts.checkpoint
    stored = stored_slots(checkpoint)
    made_up = isinstance(checkpoint, DummyCheckpoint)
    slots_of: SlotsOf = (lambda _mix: stored) if made_up else setup.artefacts.slots
    try:
        predictor = Predictor(
            setup.planned,
            slots_of,
            stored,
            _planner_device(setup.device),
            work,
            torch.device(setup.device),
            speeds,
        )
        for name in [*setup.space.float_weights, *setup.space.weights]:
            predictor.measure_kernels(name)
    except UserError as error:
        _log.warning("nothing is predicted: %s", error)
        return None
    store.remember(_SPEEDS, setup.device, {kind: asdict(speed) for kind, speed in predictor.speeds.items()})
    return predictor


def stored_slots(checkpoint: Checkpoint) -> list[TensorSlot]:
    """The checkpoint's tensors named as in a GGUF file; empty where one is no type that such a file has."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    if isinstance(checkpoint, DummyCheckpoint):
        found = {name: (shape, "BF16") for name, shape in matrix_shapes(checkpoint).items()}
    for name in checkpoint.names():
        tensor = checkpoint.tensor(name)
        if tensor.type_name not in TYPES:
            return []
        found[name] = tensor.shape, tensor.type_name
    known = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}
    return [TensorSlot(known.get(name, name.replace("model.layers.", "blk.")), *each) for name, each in found.items()]


def _planner_device(device: str) -> Device:
    if device == "cpu":
        return this_machine()
    words = torch.cuda.get_device_name(0).lower().split()
    catalog = load_catalog()
    for word in words:
        try:
            return catalog.find_device(word)
        except UserError:
            continue
    raise UserError(f"the catalog does not know {' '.join(words)}", "give --price and try again")
