"""`tokenmill optimize` from the job to the output directory: prepare, run the loop, write the results.

An interrupted run writes a partial report. Called by the command line.
"""

from __future__ import annotations

import shutil
import sys

from tokenmill import __version__
from tokenmill.checkpoint.sources.base import readable_bytes
from tokenmill.errors import UserError
from tokenmill.hardware.catalog import load_catalog
from tokenmill.hardware.machine import detect_machine
from tokenmill.log import get_logger
from tokenmill.optimize.artefacts import TRAINED_HEADS, ArtefactCache
from tokenmill.optimize.budget import TimeBudget
from tokenmill.optimize.candidates import STORED, parse_weights
from tokenmill.optimize.contender_pool import ResourceLimits
from tokenmill.optimize.loop import Say, Search
from tokenmill.optimize.machine_laboratory import MachineLaboratory
from tokenmill.optimize.others import measure_others
from tokenmill.optimize.outputs import Workload as ServedWorkload
from tokenmill.optimize.outputs import write_outputs
from tokenmill.optimize.pricing import machine_price, project, token_price
from tokenmill.optimize.quality import QualityPlan
from tokenmill.optimize.question import OptimizeJob
from tokenmill.optimize.results import PASSED, CandidateResult, Outcome
from tokenmill.optimize.setup import Setup, make_predictor, prepare
from tokenmill.optimize.store import Store, question_key
from tokenmill.optimize.wording import MADE_UP
from tokenmill.plan.question.workload import Workload

_log = get_logger(__name__)
_LONG_CONTEXT = 4096  # that KV dtypes and budgets are checked at, beside the longest request
_TRIED_AT_ONCE = 12  # quantized candidates that the disk forecast counts


def optimize(job: OptimizeJob, say: Say) -> Outcome:
    """Raises KeyboardInterrupt after the partial report is written."""
    budget = TimeBudget(job.effort.seconds)
    setup = prepare(job)
    disk = _state_disk(setup.artefacts, [*setup.space.float_weights[:1], *setup.space.weights])
    store = Store(job.out, _key(job, setup), job.restart)
    lab = _laboratory(job, setup, store)
    search = Search(
        lab=lab,
        store=store,
        space=setup.space,
        effort=job.effort,
        limits=job.limits,
        predictor=make_predictor(setup, store),
        say=say,
        objectives=bool(job.objectives),
        quality_off=job.quality_off,
        drafts_pay=setup.traffic.is_text,
        measures_today=not job.today,
        budget=budget,
    )
    state = "complete"
    interrupted: KeyboardInterrupt | None = None
    try:
        search.run()
    except KeyboardInterrupt as error:
        state, interrupted = "interrupted", error
    state = state if interrupted or not search.out_of_time else "out of time"
    outcome = _outcome(job, setup, search, state, disk)
    if interrupted is None:
        measure_others(job, setup, lab, outcome, say)
        _price(job, outcome)
        outcome.projections = _projections(job, setup, outcome)
    outcome.seconds = budget.used * budget.seconds
    write_outputs(job.out, outcome, _served_workload(setup, outcome.chosen))
    if interrupted is not None:
        print(f"interrupted; the report so far: {job.out / 'report.html'}", file=sys.stderr)
        raise interrupted
    return outcome


def _laboratory(job: OptimizeJob, setup: Setup, store: Store) -> MachineLaboratory:
    effort = job.effort
    quality = QualityPlan(
        setup.text,
        effort.context,
        effort.short_windows,
        effort.windows,
        job.max_quality_loss,
        job.max_kld,
        job.tasks,
        job.max_task_loss,
        long_contexts=tuple(sorted({_LONG_CONTEXT, setup.traffic.longest})),
    )
    if not job.quality_off:
        print(f"quality limits: {quality.limit_words}", file=sys.stderr)
    limits = ResourceLimits.within(effort.seconds)
    return MachineLaboratory(
        store,
        setup.traffic,
        setup.engine,
        setup.artefacts,
        quality,
        limits,
        setup.arrivals,
        job.objectives,
        setup.served.decided("concurrency"),
    )


def _served_workload(setup: Setup, chosen: CandidateResult | None) -> ServedWorkload:
    traffic, artefacts = setup.traffic, setup.artefacts
    drafter = None
    if chosen is not None and chosen.speculate in TRAINED_HEADS:
        drafter = artefacts.drafter_path(parse_weights(chosen.weights), chosen.speculate)
    return ServedWorkload(
        setup.served,
        artefacts.checkpoint.description.context_length,
        traffic.input_tokens,
        traffic.output_tokens,
        setup.effort.context,
        drafter,
    )


def _state_disk(artefacts: ArtefactCache, weights: list[str]) -> int:
    """Bytes of disk the run needs; reported, and refused if there is no room for the baseline, the first of these."""
    plain = _forecast(artefacts, weights[0])
    sizes = sorted((_forecast(artefacts, name) for name in weights[1:]), reverse=True)
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


def _key(job: OptimizeJob, setup: Setup) -> str:
    """Hash of all that the measurements depend on; targets, prices and the time budget may change."""
    effort = job.effort
    return question_key(
        {
            "version": __version__,
            "model": setup.artefacts.digest,
            "device": setup.device,
            "traffic": job.traffic.describe(),
            "traffic_log": str(job.traffic_log or ""),
            "text": setup.text,
            "tasks": [str(path) for path in job.tasks],
            "objectives": job.objectives.words,
            "quality_off": job.quality_off,
            "windows": [effort.short_windows, effort.windows, effort.context],
            "engine": str(job.engine),
        }
    )


def _outcome(job: OptimizeJob, setup: Setup, search: Search, state: str, disk: int) -> Outcome:
    machine = detect_machine()
    price, basis = machine_price(load_catalog(), machine, job.price, setup.device)
    outcome = Outcome(
        model=job.model,
        state=state,
        source=str(setup.source),
        source_note=MADE_UP if job.made_up else _source_note(setup.source_quantized),
        made_up=job.made_up,
        workload=job.traffic.describe(),
        workload_words=f"{setup.traffic.words}; replayed: {setup.arrivals.words}"
        if job.objectives
        else setup.traffic.words,
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
        source_quantized=setup.source_quantized,
        objectives=job.objectives.words,
        quality_off=job.quality_off,
        unproven=search.unproven,
        margin=search.margin,
        today=search.today,
        max_kld=job.max_kld,
        max_task_loss=job.max_task_loss,
        device=setup.device,
        seed=job.engine.seed,
    )
    _price(job, outcome)
    outcome.reason = _reason(outcome)
    return outcome


def _price(job: OptimizeJob, outcome: Outcome) -> None:
    """Dollars per million output tokens of everything that was measured."""
    others = [*outcome.rivals, *([outcome.today] if outcome.today else [])]
    for result in (*outcome.baseline_variants, *outcome.candidates, *others):
        result.dollars_per_million_output = token_price(result, outcome.price, bool(job.objectives))


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
        kept = "" if outcome.quality_off else " and keeps the quality"
        return f"no candidate is cheaper{kept}: serve the baseline"
    if outcome.chosen is outcome.baseline:
        kept = "" if outcome.quality_off else ", of what keeps the quality,"
        return f"nothing{kept} is cheaper here than the unquantized weights: serve those"
    if outcome.target_met:
        tied = [name for name in outcome.tied if name != outcome.chosen.name]
        return f"tied in cost with {', '.join(tied)}; the better quality was taken" if tied else ""
    cheaper: list[CandidateResult] = [
        each
        for each in outcome.candidates
        if each.speed
        and outcome.chosen.speed
        and each.name not in (*outcome.tied, *outcome.unproven)
        and each.speed.cost_ratio < outcome.chosen.speed.cost_ratio
    ]
    why = f"; {cheaper[0].name} is cheaper, but {cheaper[0].reason}" if cheaper else ""
    return f"the target of {-outcome.target_cost:.0%} is not reached on this machine: this is the best point{why}"


def _projections(job: OptimizeJob, setup: Setup, outcome: Outcome) -> list[dict[str, object]]:
    planned, traffic = setup.planned, setup.traffic
    if not job.gpus or planned is None or outcome.chosen is None or outcome.chosen.artefact is None:
        return []
    workload = Workload(traffic.input_tokens, traffic.output_tokens, setup.engine.decided("concurrency"))
    bits = outcome.chosen.artefact.bits_per_weight
    return project(load_catalog(), list(job.gpus), planned, workload, bits)
