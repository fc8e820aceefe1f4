"""One candidate's measurements: each is asked of the laboratory once, remembered, and its failure recorded.

A candidate that fails is not tried again, in this run or a later one, unless it was given up for its time and the later
run allows more; one that was being tried when the process was killed gets a second chance, because the kill may have
had another cause. Owns no order and no time limits of rounds. Called by the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from tokenmill.errors import UserError
from tokenmill.optimize.artefacts import NotEnoughTimeError
from tokenmill.optimize.budget import TimeBudget
from tokenmill.optimize.contender import NoAnswerError
from tokenmill.optimize.evidence import (
    CostEstimate,
    Limits,
    compare_speed,
    cost_ratios,
    estimate_cost,
    ratio_noise,
    short_text_refusal,
)
from tokenmill.optimize.laboratory import Laboratory
from tokenmill.optimize.records import from_plain, to_plain
from tokenmill.optimize.results import (
    FAILED,
    HARMED,
    PASSED,
    SLOWER,
    CandidateResult,
    Latency,
    Proof,
    Quality,
    Run,
    Sustained,
)
from tokenmill.optimize.store import Store

_LOSSY_OPTIONS = ("kv_budget", "kv_budget_policy", "kv_native_layers", "quantization")
_KILLS = 2  # that a candidate is allowed to be around for


class Trials:
    def __init__(
        self,
        lab: Laboratory,
        store: Store,
        budget: TimeBudget,
        limits: Limits,
        objectives: bool = False,
        quality_off: bool = False,
    ) -> None:
        self.lab = lab
        self.store = store
        self.budget = budget
        self.limits = limits
        self.objectives = objectives
        self.quality_off = quality_off
        self.out_of_time = False
        self._ratios: dict[str, list[float]] = {}
        self._noise: float | None = None  # computed when it is asked for

    def record_kill(self) -> None:
        """An earlier process was killed while it tried a candidate."""
        name = self.store.interrupted_attempt
        if name is None:
            return
        kills = int(self.store.recall("killed", name) or 0) + 1
        self.store.remember("killed", name, kills)
        if kills >= _KILLS:
            self.store.remember("failed", name, f"the process was killed {kills} times while trying it: out of memory?")
        self.store.forget_attempt()

    def attempt(self, result: CandidateResult, work: Callable[..., object], *arguments: object, name: str = "") -> bool:
        """`work(*arguments)`, which measures a candidate; False if it failed or returned False. A failure is recorded
        under `name`, the candidate's own if empty, and does not end the search."""
        name = name or result.name
        if failed := self._known_failure(name):
            result.verdict, result.reason = FAILED, failed
            return False
        try:
            with self.store.attempt(name):
                return bool(work(*arguments))
        except NotEnoughTimeError as error:
            result.reason, self.out_of_time = str(error), True
        except Exception as error:  # any exception: a registered method or store may be third-party code
            self.record_failure(result, error, name)
        return False

    def record_failure(self, result: CandidateResult, error: Exception, name: str = "") -> None:
        result.verdict, result.reason = FAILED, explained(error)
        if isinstance(error, NoAnswerError):
            self.store.remember("no answer", name or result.name, [result.reason, self.budget.seconds])
        else:
            self.store.remember("failed", name or result.name, result.reason)

    def _known_failure(self, name: str) -> str:
        """Of an earlier attempt. One that was given up for its time is tried again where a longer run allows more."""
        reason, seconds = self.store.recall("no answer", name) or ("", 0.0)
        return str(self.store.recall("failed", name) or (reason if self.budget.seconds <= seconds else ""))

    # --- the measurements ---

    def build(self, result: CandidateResult, seconds: float, kind: str = "build") -> None:
        with self.budget.timed(kind):
            result.artefact = self.lab.build(result, seconds)

    def look(self, baseline: CandidateResult, result: CandidateResult, seconds: float, kind: str = "build") -> bool:
        """Build it, check it on the short text, time it once."""
        self.build(result, seconds, kind)
        if not self.check(baseline, result):
            return False
        self.time(baseline, result)
        result.rounds = max(result.rounds, 1)
        self.store.remember("looked", result.name, True)
        return True

    def check(self, baseline: CandidateResult, result: CandidateResult) -> bool:
        if self.quality_off:
            return True
        record = self.store.recall("checked", _quality_name(result))
        if record is None:
            with self.budget.timed("check"):
                record = to_plain(self.lab.check(baseline, result))
            self.store.remember("checked", _quality_name(result), record)
        result.divergence = from_plain(Quality, record)
        result.reason = short_text_refusal(result.divergence, self.limits)
        if result.reason:
            result.verdict = HARMED
        return not result.reason

    def time(self, baseline: CandidateResult, result: CandidateResult, kind: str = "first") -> None:
        """A short run beside the baseline; `kind` tells repeats apart."""
        with self.budget.timed("pair"):
            base, runs = self.lab.pair(kind, baseline, result)
        repeats = [] if kind == "first" else self._ratios.get(result.name, [])
        self._add_ratios(result.name, [*repeats, *map(float, cost_ratios(base, runs))])
        if kind == "first":
            result.speed = compare_speed(base, runs)
        if baseline.speed is None:
            baseline.speed = compare_speed(base, base)

    def time_again(self, baseline: CandidateResult, result: CandidateResult, kind: str) -> bool:
        self.time(baseline, result, kind)
        return True

    def add_repeats(self, name: str, base: list[Run], runs: list[Run]) -> None:
        """Runs of other pairs, for what they say about noise."""
        self._add_ratios(name, list(map(float, cost_ratios(base, runs))))

    def _add_ratios(self, name: str, ratios: list[float]) -> None:
        self._ratios[name] = ratios
        self._noise = None

    def accept(self, baseline: CandidateResult, result: CandidateResult) -> bool:
        """Whether it keeps its quality and, under the arrivals, its latency."""
        if not self.prove(baseline, result):
            return False
        if not self.objectives:
            return True
        latency = self.replay(result)
        if not latency.objective_met:
            result.verdict, result.reason = SLOWER, latency.refusal or "it misses the latency objectives"
            return False
        return self.sustain(result)  # while its server runs: starting one takes longer than the search

    def prove(self, baseline: CandidateResult, result: CandidateResult) -> bool:
        """All of its quality, settings included: losses that were proven apart are never added up."""
        if self.quality_off:
            result.verdict, result.reason = PASSED, ""
            return True
        record = self.store.recall("proved", _quality_name(result))
        limits = asdict(self.limits)
        if record is None or record["limits"] != limits:
            with self.budget.timed("prove"):
                proof = self.lab.prove(baseline, result)
            record = {"limits": limits, "proof": to_plain(proof)}
            self.store.remember("proved", _quality_name(result), record)
        proof = from_plain(Proof, record["proof"])
        result.quality, result.tasks, result.checks = proof.quality, proof.tasks, proof.checks
        result.reason = "; ".join(proof.refusals)
        result.verdict = HARMED if proof.refusals else PASSED
        return not proof.refusals

    def replay(self, result: CandidateResult) -> Latency:
        record = self.store.recall("replayed", result.name)
        if record is None:
            with self.budget.timed("replay"):
                record = to_plain(self.lab.replay(result))
            self.store.remember("replayed", result.name, record)
        result.latency = from_plain(Latency, record)
        return result.latency

    def sustain(self, result: CandidateResult) -> bool:
        """The highest rate that keeps the objectives, and the goodput there, which is what a token costs by."""
        record = self.store.recall("sustained", result.name)
        if record is None:
            with self.budget.timed("sustain"):
                record = to_plain(self.lab.sustain(result))
            self.store.remember("sustained", result.name, record)
        found = from_plain(Sustained, record)
        result.sustained, result.goodput_range = found.latency, found.range
        return True

    def is_sustained(self, result: CandidateResult) -> bool:
        """Whether that is in the store."""
        return self.store.recall("sustained", result.name) is not None

    # --- what is known ---

    def is_looked_at(self, name: str) -> bool:
        """Whether an earlier run has its answer: looking again takes no time."""
        return bool(self._known_failure(name)) or self.store.recall("looked", name) is not None

    def is_judged(self, result: CandidateResult) -> bool:
        """Whether all that `accept` needs is in the store, for these limits."""
        if self.objectives and not all(self.store.recall(kind, result.name) for kind in ("replayed", "sustained")):
            return False
        record = self.store.recall("proved", _quality_name(result))
        return self.quality_off or (record is not None and record["limits"] == asdict(self.limits))

    @property
    def proof_seconds(self) -> float:
        """That `accept` is expected to take."""
        kinds = [*([] if self.quality_off else ["prove"]), *(["replay", "sustain"] if self.objectives else [])]
        return sum(map(self.budget.expected, kinds))

    def estimate(self, result: CandidateResult) -> CostEstimate:
        return estimate_cost(self._ratios[result.name], self.noise)

    def timed(self, result: CandidateResult) -> bool:
        return result.name in self._ratios

    @property
    def noise(self) -> float:
        if self._noise is None:
            self._noise = ratio_noise(self._ratios.values())
        return self._noise


def _quality_name(result: CandidateResult) -> str:
    """Settings with equal names predict the same tokens: batch size, caching and drafts change no number."""
    lossy = [f"{key}={result.options[key]}" for key in _LOSSY_OPTIONS if key in result.options]
    return "/".join([result.weights, result.kv, *lossy])


def explained(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
