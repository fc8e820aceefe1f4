"""`optimize --traffic-log DIR --watch`: runs the loop again when the traffic has drifted, and proposes what it finds.

Compares the last window of the log with the one that the present choice was proven on. A proposal names what drifted,
the saving against the present choice and the report that proves it; nothing is changed. State lies in the output folder
(`watch.json`, `proposals.jsonl`), so that a watch that was killed goes on. Called by the command line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokenmill.bench.traffic_log import read_traffic_log
from tokenmill.errors import UserError
from tokenmill.optimize.drift import Drift, Thresholds, Window, drifts, window_of
from tokenmill.optimize.job import optimize
from tokenmill.optimize.loop import Say
from tokenmill.optimize.question import OptimizeJob
from tokenmill.optimize.results import CandidateResult, Outcome
from tokenmill.serve.traffic_log_format import HEADER, PATTERN

STATE_FILE = "watch.json"
PROPOSALS_FILE = "proposals.jsonl"
_VERSION = 1
Run = Callable[[OptimizeJob, Say], Outcome]


@dataclass(frozen=True, slots=True)
class WatchSettings:
    interval_s: float = 3600.0  # between two looks at the log
    window_s: float = 24 * 3600.0  # of traffic that is looked at
    rounds: int = 0  # looks; 0: until it is interrupted
    thresholds: Thresholds = field(default_factory=Thresholds)

    def __post_init__(self) -> None:
        if self.interval_s <= 0 or self.window_s <= 0:
            raise UserError("the watch has no interval or no window", "give --watch-interval above 0")


@dataclass(frozen=True, slots=True)
class Proposal:
    """What to change and why. `to` equal to `present`: keep it, it is proven on today's traffic too."""

    when: str
    drift: tuple[str, ...]  # what drifted, with figures; empty at the first run
    present: str  # the choice so far; empty at the first run
    to: str
    saving: float | None  # of cost against the present choice, measured in the same run; None: not comparable
    report: str
    reason: str = ""

    @property
    def is_change(self) -> bool:
        return bool(self.to) and self.to != self.present

    def words(self) -> str:
        drift = f" after a drift of {'; '.join(self.drift)}" if self.drift else ""
        if not self.to:
            return f"no candidate was chosen{drift}: {self.reason or 'see the report'} ({self.report})"
        if not self.is_change:
            return f"keep {self.to}{drift}: proven again ({self.report})"
        saving = "" if self.saving is None else f", {self.saving:.0%} cheaper than {self.present}"
        return f"proposed: {self.to}{saving}{drift} ({self.report}); nothing was changed"


@dataclass(slots=True)
class WatchState:
    choice: str = ""
    proven_on: Window | None = None
    running: str = ""  # output folder of a run that has not ended
    running_on: Window | None = None
    drift: tuple[str, ...] = ()  # that caused it


def watch(
    job: OptimizeJob,
    log: Path,
    settings: WatchSettings,
    say: Say,
    tell: Callable[[Proposal], None],
    *,
    run: Run = optimize,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Proposal]:
    """Look at the log every `interval_s` seconds. `tell` hears of each finished run. Returns the proposals when the
    rounds are over; KeyboardInterrupt ends a watch between or in runs, and its state goes on next time."""
    state = load_state(job.out)
    proposals: list[Proposal] = []
    done = 0
    while True:
        found = _look(job, log, settings, state, run, say, clock())
        if found is not None:
            proposals.append(found)
            tell(found)
        done += 1
        if settings.rounds and done >= settings.rounds:
            return proposals
        sleep(settings.interval_s)


def _look(
    job: OptimizeJob, log: Path, settings: WatchSettings, state: WatchState, run: Run, say: Say, now: float
) -> Proposal | None:
    """One look at the log: a finished run as a proposal, or None where traffic is as it was or there is too little."""
    if not state.running:
        window = _last_window(log, settings, now)
        if window is None:
            return None
        changed: Sequence[Drift] = ()
        if state.proven_on is not None:
            changed = [each for each in drifts(state.proven_on, window, settings.thresholds) if each.is_large]
            if not changed:
                return None
        folder = job.out / datetime.fromtimestamp(now, UTC).strftime("watch-%Y%m%dT%H%M%S")
        copy_window(log, folder / "traffic", window)
        state.running, state.running_on = str(folder), window
        state.drift = tuple(f"{each.what}: {each.words}" for each in changed)
        save_state(job.out, state)
    folder = Path(state.running)
    changes: dict[str, Any] = {"out": folder, "traffic_log": folder / "traffic"}
    outcome = run(replace(job, **changes), say)
    proposal = _proposal(state, outcome, folder, now)
    state.choice = proposal.to or state.choice
    state.proven_on, state.running, state.running_on = state.running_on, "", None
    with (job.out / PROPOSALS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(proposal)) + "\n")
    save_state(job.out, state)
    return proposal


def _last_window(log: Path, settings: WatchSettings, now: float) -> Window | None:
    requests = [each for each in read_traffic_log(log) if now - settings.window_s <= each.arrival_unix <= now]
    return window_of(requests) if len(requests) >= settings.thresholds.min_requests else None


def copy_window(log: Path, folder: Path, window: Window) -> None:
    """The requests of the window as a traffic log of its own: the server goes on writing, and deletes old files."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept: list[bytes] = []
    for path in sorted(log.glob(PATTERN)):
        for line in path.read_bytes().split(b"\n"):
            try:
                row = json.loads(line) if line.strip() else None
            except ValueError:
                continue
            if not isinstance(row, dict):
                continue
            is_header = HEADER in row
            if (is_header and not kept) or (
                not is_header and window.since_unix <= row.get("arrival_unix", 0.0) <= window.until_unix
            ):
                kept.append(line)
    (folder / PATTERN.replace("*", "window")).write_bytes(b"\n".join(kept) + b"\n")


def _proposal(state: WatchState, outcome: Outcome, folder: Path, now: float) -> Proposal:
    chosen = outcome.chosen
    return Proposal(
        when=datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds"),
        drift=state.drift,
        present=state.choice,
        to=chosen.name if chosen else "",
        saving=_saving(state.choice, chosen, outcome),
        report=str(folder / "report.html"),
        reason=outcome.reason,
    )


def _saving(present: str, chosen: CandidateResult | None, outcome: Outcome) -> float | None:
    """By how much the choice is cheaper than the present one, if this run measured both."""
    if chosen is None or not present:
        return None
    everyone = [*outcome.candidates, *outcome.baseline_variants, *([outcome.baseline] if outcome.baseline else [])]
    known = [each.dollars_per_million_output for each in everyone if each.name == present]
    before = next((dollars for dollars in known if dollars), None)
    after = chosen.dollars_per_million_output
    return None if not before or not after else 1 - after / before


# --- state ---


def load_state(out: Path) -> WatchState:
    """A new one where there is none, or one that this version does not understand."""
    try:
        data = json.loads((out / STATE_FILE).read_text(encoding="utf-8"))
        if data.pop("version") != _VERSION:
            return WatchState()
        for name in ("proven_on", "running_on"):
            data[name] = _window(data[name])
        return WatchState(**{**data, "drift": tuple(data["drift"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return WatchState()


def _window(data: dict[str, Any] | None) -> Window | None:
    if data is None:
        return None
    lengths = {name: tuple(data[name]) for name in ("prompt_lengths", "output_lengths")}
    return Window(**{**data, **lengths})


def save_state(out: Path, state: WatchState) -> None:
    out.mkdir(parents=True, exist_ok=True)
    partial = out / f"{STATE_FILE}.partial"
    partial.write_text(json.dumps({"version": _VERSION, **asdict(state)}, indent=1), encoding="utf-8")
    partial.replace(out / STATE_FILE)
