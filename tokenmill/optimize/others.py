"""What the choice is compared with beside the baseline: how the checkpoint is served today, and other engines.

Each is driven over HTTP by the same arrivals. Imported only where the job asks for it. Called by the job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.optimize.results import Outcome
from tokenmill.optimize.setup import Setup

if TYPE_CHECKING:
    from tokenmill.optimize.job import OptimizeJob
    from tokenmill.optimize.loop import Say


def measure_others(job: OptimizeJob, setup: Setup, outcome: Outcome, say: Say) -> None:
    """Fills `outcome.today` and `outcome.rivals`, where the job asks for them."""
    if not (job.today or job.rivals):
        return
    from tokenmill.optimize.objectives import Objectives  # type: ignore[import-not-found, unused-ignore]
    from tokenmill.optimize.traffic import build_arrivals  # type: ignore[attr-defined, unused-ignore]

    description = setup.artefacts.checkpoint.description
    arrivals = build_arrivals(job.traffic, description.vocab_size, setup.engine.decided("context"))
    objectives = job.objectives or Objectives(())
    if job.today:
        from tokenmill.optimize.today import measure_today  # type: ignore[import-not-found, unused-ignore]

        say("measuring how it is served today", 0.96)
        outcome.today = measure_today(job.today, setup.source, arrivals, objectives, config=setup.engine)
    if job.rivals:
        from tokenmill.optimize.rivals import measure_rivals  # type: ignore[import-not-found, unused-ignore]

        say("measuring other engines", 0.97)
        outcome.rivals = measure_rivals(
            job.rivals, setup.source, arrivals, objectives, None, lambda what: say(what, 0.97)
        )
