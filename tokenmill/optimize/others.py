"""What the choice is compared with over HTTP: how the checkpoint is served today, and other engines.

All are driven by the same arrivals as our own server; where no objective is given, by all requests at once, and then
the chosen candidate is replayed too, so that engines are compared by one kind of measurement. The stored file on our
own engine is measured by the loop. Called by the job.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.optimize.contender_pool import ResourceLimits
from tokenmill.optimize.laboratory import Laboratory
from tokenmill.optimize.loop import Say
from tokenmill.optimize.question import OptimizeJob
from tokenmill.optimize.results import CandidateResult, Outcome
from tokenmill.optimize.rivals.base import RivalWorkload
from tokenmill.optimize.rivals.measure import find_rivals, measure_rivals
from tokenmill.optimize.rivals.quality import EndpointJudge
from tokenmill.optimize.setup import Setup
from tokenmill.optimize.today import measure_today

_log = get_logger(__name__)


def measure_others(job: OptimizeJob, setup: Setup, lab: Laboratory, outcome: Outcome, say: Say) -> None:
    """Fills `outcome.today` and `outcome.rivals`, where the job asks for them."""
    rivals = () if job.made_up else job.rivals  # others have nothing to read
    if not (job.today or find_rivals(rivals)):
        return
    limits = ResourceLimits.within(job.effort.seconds)
    seconds, search, start = limits.replay_seconds, limits.rate_search_seconds, _sustained_scale(setup, outcome)
    reference = outcome.baseline.artefact if outcome.baseline else None
    judge = None
    if reference is not None and not job.quality_off:
        config = replace(setup.engine, speculate="off", concurrency=None)
        judge = EndpointJudge(Path(reference.path), setup.text, job.max_quality_loss, job.max_kld, config)
    if not job.objectives and outcome.chosen is not None:
        say("replaying the traffic on the choice", 0.95)
        try:
            outcome.chosen.latency = lab.replay(outcome.chosen)
        except UserError as error:
            _log.warning("the choice is not compared with servers: %s", error)
    lab.close()
    if job.today:
        say("measuring how it is served today", 0.96)
        outcome.today = measure_today(
            job.today,
            setup.source,
            setup.arrivals,
            job.objectives,
            judge=judge,
            time_limit_s=seconds,
            search_seconds=search,
            search_start=start,
            log=job.out / "today.log",
            say=lambda what: say(what, 0.96),
        )
    outcome.rivals = measure_rivals(
        rivals,
        setup.source,
        setup.arrivals,
        job.objectives,
        judge,
        lambda what: say(what, 0.98),
        preferred=_made(outcome.chosen),
        workload=RivalWorkload(
            setup.engine.decided("context"), setup.engine.decided("concurrency"), setup.engine.decided("batch_tokens")
        ),
        time_limit_s=seconds,
        search_seconds=search,
        search_start=start,
        logs=job.out,
    )


def _made(chosen: CandidateResult | None) -> tuple[str, Path] | None:
    """The chosen weights, which a rival serves if it can read them: the same bytes on another engine."""
    return (chosen.weights, Path(chosen.artefact.path)) if chosen and chosen.artefact else None


def _sustained_scale(setup: Setup, outcome: Outcome) -> float:
    """The rate that our own server sustains, over that of the arrivals: others are searched from there."""
    served = outcome.chosen or outcome.baseline
    found = served.sustained if served else None
    return found.offered_requests_s / setup.arrivals.requests_s if found else 1.0
