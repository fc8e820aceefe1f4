"""`tokenmill optimize` from the job to the output directory: prepare, run the loop, write the results.

An interrupted run writes a partial report. Called by the command line.
"""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill import __version__
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.sources import resolve
from tokenmill.checkpoint.sources.base import readable_bytes
from tokenmill.checkpoint.tokenizer_files import load_tokenizer
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.evaluate.windows import read_text
from tokenmill.hardware.catalog import load_catalog
from tokenmill.hardware.machine import detect_machine
from tokenmill.log import get_logger
from tokenmill.model.kvstore import EVERYDAY_STORES, KV_STORES
from tokenmill.optimize.artefacts import ArtefactCache
from tokenmill.optimize.candidates import (
    STORED,
    chosen_names,
    parse_weights,
    registered_weights,
    unquantized_weights,
)
from tokenmill.optimize.loop import Effort, Say, Search, workload_engine
from tokenmill.optimize.objectives import Objectives
from tokenmill.optimize.outputs import Workload as ServedWorkload
from tokenmill.optimize.outputs import write_outputs
from tokenmill.optimize.predict import Predictor, this_machine
from tokenmill.optimize.pricing import machine_price, project, token_price
from tokenmill.optimize.results import PASSED, CandidateResult, Outcome
from tokenmill.optimize.store import Store, question_key
from tokenmill.optimize.traffic import Traffic, TrafficRequest, build_traffic
from tokenmill.plan.cost.closed_loop import Load
from tokenmill.plan.question.model_names import describe_for_planning
from tokenmill.plan.question.planned_model import PlannedModel
from tokenmill.plan.question.workload import Workload
from tokenmill.quantize.calibration_text import built_in_held_out

_log = get_logger(__name__)
_PLAIN_TYPES = ("F32", "F16", "BF16", "F64")
_TRIED_AT_ONCE = 12  # quantized candidates that the disk forecast counts


@dataclass(frozen=True, slots=True)
class OptimizeJob:
    model: str
    out: Path
    target_cost: float = -0.6
    max_quality_loss: float = 0.01
    traffic: TrafficRequest = field(default_factory=TrafficRequest)
    price: float | None = None
    text: Path | None = None
    gpus: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()
    kv: tuple[str, ...] = ()
    effort: Effort = field(default_factory=Effort)
    engine: EngineConfig = field(default_factory=EngineConfig)
    restart: bool = False
    command: str = ""
    device: str = "cpu"
    objectives: Objectives = field(default_factory=Objectives)
    tasks: tuple[Path, ...] = ()
    max_task_loss: float = 0.02
    max_kld: float | None = None
    today: str = ""  # command or URL of what is served today; empty: our engine on the stored file
    rivals: tuple[str, ...] = ("auto",)
    quality_off: bool = False
    traffic_log: Path | None = None

    def __post_init__(self) -> None:
        if not -1 < self.target_cost <= 0:
            raise UserError(f"--target-cost is {self.target_cost:g}", "give a saving such as -60%")
        if not self.max_quality_loss >= 0:
            raise UserError(f"--max-quality-loss is {self.max_quality_loss:g}", "give 0 or more, such as 1%")
        if self.effort.seconds <= 0 or self.effort.runs < 1:
            raise UserError("there is no time to measure in", "give --minutes and --runs above 0")


def optimize(job: OptimizeJob, say: Say) -> Outcome:
    """Raises KeyboardInterrupt after the partial report is written."""
    began = time.monotonic()
    source = resolve(job.model).path
    checkpoint = open_checkpoint(source)
    description = checkpoint.description
    traffic = build_traffic(
        job.traffic, description.vocab_size, load_tokenizer(source), job.engine.context or description.context_length
    )
    artefacts = ArtefactCache(source, checkpoint, job.model, job.engine.threads or 0, job.engine.device or "cpu")
    quantized = _is_quantized(artefacts)
    weights = chosen_names(job.candidates, registered_weights(quantized), "weights")
    kv = chosen_names(job.kv, list(KV_STORES), "KV cache dtype") if job.kv else list(EVERYDAY_STORES)
    text = read_text(job.text) if job.text else built_in_held_out()
    disk = _state_disk(artefacts, weights)
    store = Store(job.out, _key(job, artefacts, text), job.restart)
    planned = _planned(source)
    search = Search(
        artefacts,
        store,
        traffic,
        text,
        workload_engine(job.engine, traffic, job.traffic.concurrency),
        job.effort,
        job.max_quality_loss,
        weights,
        kv,
        _predictor(planned, artefacts, traffic, job),
        say,
    )
    state = "complete"
    interrupted: KeyboardInterrupt | None = None
    try:
        search.run()
    except KeyboardInterrupt as error:
        state, interrupted = "interrupted", error
    outcome = _outcome(job, search, state if interrupted or not search.out_of_time else "out of time", quantized, disk)
    outcome.seconds = time.monotonic() - began
    outcome.projections = _projections(job, planned, traffic, outcome) if interrupted is None else []
    workload = ServedWorkload(
        search.engine, description.context_length, traffic.input_tokens, traffic.output_tokens, job.effort.context
    )
    write_outputs(job.out, outcome, workload)
    if interrupted is not None:
        print(f"interrupted; the report so far: {job.out / 'report.html'}", file=sys.stderr)
        raise interrupted
    return outcome


def _is_quantized(artefacts: ArtefactCache) -> bool:
    """Whether the source checkpoint is itself quantized, judged by its largest tensors."""
    checkpoint = artefacts.checkpoint
    types = {checkpoint.tensor(name).type_name for name in checkpoint.names()}
    return any(name.upper() not in _PLAIN_TYPES for name in types)


def _state_disk(artefacts: ArtefactCache, weights: list[str]) -> int:
    """Bytes of disk the run needs; reported, and refused if there is no room for the baseline."""
    plain = sum(artefacts.forecast_bytes(parse_weights(name)) for name in unquantized_weights())
    sizes = sorted((_forecast(artefacts, name) for name in weights), reverse=True)
    needed = plain + sum(sizes[:_TRIED_AT_ONCE])
    folder = artefacts.folder
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    print(f"needs up to {readable_bytes(needed)} in {folder} ({readable_bytes(free)} are free)", file=sys.stderr)
    if plain > free:
        raise UserError(
            f"the unquantized baseline needs {readable_bytes(plain)} in {folder}, {readable_bytes(free)} are free",
            "make room, or set TOKENMILL_CACHE to a folder on a larger disk",
        )
    return needed


def _forecast(artefacts: ArtefactCache, name: str) -> int:
    try:
        return artefacts.forecast_bytes(parse_weights(name))
    except UserError:  # recorded as failed when it is tried
        return 0


def _key(job: OptimizeJob, artefacts: ArtefactCache, text: str) -> str:
    """Hash of all that the measurements depend on; targets, prices and the time budget may change."""
    effort = job.effort
    return question_key(
        {
            "version": __version__,
            "model": artefacts.digest,
            "traffic": job.traffic.describe(),
            "text": text,
            "windows": [effort.short_windows, effort.windows, effort.context],
            "engine": str(job.engine),
        }
    )


def _planned(source: Path) -> PlannedModel | None:
    try:
        return describe_for_planning(source)
    except UserError as error:
        _log.warning("the planner does not know this model, everything is tried: %s", error)
        return None


def _predictor(
    planned: PlannedModel | None, artefacts: ArtefactCache, traffic: Traffic, job: OptimizeJob
) -> Predictor | None:
    if planned is None:
        return None
    load = Load(traffic.input_tokens, traffic.output_tokens, job.traffic.concurrency)
    try:
        return Predictor(planned, artefacts.slots, this_machine(), load)
    except UserError as error:
        _log.warning("nothing is predicted: %s", error)
        return None


def _outcome(job: OptimizeJob, search: Search, state: str, quantized: bool, disk: int) -> Outcome:
    machine = detect_machine()
    price, basis = machine_price(load_catalog(), machine, job.price, job.device)
    everyone = [*search.baseline_variants, *search.results.values()]
    for result in everyone:
        result.dollars_per_million_output = token_price(result, price, bool(job.objectives))
    outcome = Outcome(
        model=job.model,
        state=state,
        source=str(search.artefacts.source),
        source_note=_source_note(quantized),
        workload=job.traffic.describe(),
        workload_words=search.traffic.words,
        machine=f"{machine.cpu}, {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB",
        price=price,
        price_basis=basis,
        target_cost=job.target_cost,
        max_quality_loss=job.max_quality_loss,
        quality_text=job.text.name if job.text else "built-in held-out text",
        seconds=0.0,
        baseline=search.baseline,
        baseline_variants=search.baseline_variants,
        candidates=list(search.results.values()),
        chosen=search.results.get(search.chosen),
        tied=search.tied,
        commands=[job.command],
        disk_bytes=disk,
        source_quantized=quantized,
        today=search.results.get(STORED) if quantized else search.baseline,
        objectives=job.objectives.words,
        quality_off=job.quality_off,
        max_kld=job.max_kld,
        max_task_loss=job.max_task_loss,
        device=job.device,
        seed=job.engine.seed,
    )
    outcome.reason = _reason(outcome)
    return outcome


def _source_note(quantized: bool) -> str:
    if not quantized:
        return ""
    return (
        "The source file is itself quantized: the baseline is its weights expanded to floats, and losses are against "
        f"that. What was lost before is not in these figures. `{STORED}` means: serve the file as it is."
    )


def _reason(outcome: Outcome) -> str:
    if outcome.chosen is None:
        if outcome.state != "complete":
            proven = [each for each in outcome.candidates if each.verdict == PASSED and each.speed]
            lead = min(proven, key=lambda each: each.speed.cost_ratio if each.speed else 1.0, default=None)
            so_far = f"{lead.name} leads so far, the final is missing" if lead else "nothing was proven yet"
            return f"the run is {outcome.state}: {so_far}"
        return "no candidate is cheaper and keeps the quality: serve the baseline"
    if outcome.target_met:
        tied = [name for name in outcome.tied if name != outcome.chosen.name]
        return f"statistically tied in cost with {', '.join(tied)}; the better quality was taken" if tied else ""
    cheaper: list[CandidateResult] = [
        each
        for each in outcome.candidates
        if each.speed
        and outcome.chosen.speed
        and each.name not in outcome.tied
        and each.speed.cost_ratio < outcome.chosen.speed.cost_ratio
    ]
    why = f"; {cheaper[0].name} is cheaper, but {cheaper[0].reason}" if cheaper else ""
    return f"the target of {-outcome.target_cost:.0%} is not reached on this machine: this is the best point{why}"


def _projections(
    job: OptimizeJob, planned: PlannedModel | None, traffic: Traffic, outcome: Outcome
) -> list[dict[str, object]]:
    if not job.gpus or planned is None or outcome.chosen is None or outcome.chosen.artefact is None:
        return []
    workload = Workload(traffic.input_tokens, traffic.output_tokens, job.traffic.concurrency)
    bits = outcome.chosen.artefact.bits_per_weight
    return project(load_catalog(), list(job.gpus), planned, workload, bits)
