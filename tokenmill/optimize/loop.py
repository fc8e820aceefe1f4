"""The closed loop: predict, measure the baseline, try the candidates round by round, choose. The steps are in other
modules; this one has their order, the time of each and the record of results.

Rounds: (1) promising weights, cheap to make first, are built, checked on a short text and timed; (2) the cheapest must
prove their quality, until none that is left can be cheaper; (3) settings are tried on top (settings.py); (4) those in
question are timed again, and the finalists race (race.py). Knows the machine by `Laboratory` only. Called by the job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tokenmill.errors import UserError
from tokenmill.optimize.baseline import BaselineContest
from tokenmill.optimize.budget import TimeBudget
from tokenmill.optimize.candidates import Candidate, candidate_of
from tokenmill.optimize.evidence import Limits, compare_speed, with_goodput
from tokenmill.optimize.halving import Halving
from tokenmill.optimize.laboratory import Laboratory
from tokenmill.optimize.predict import rank_candidates, too_harmful, too_slow
from tokenmill.optimize.pruning import Predicts, Pruning
from tokenmill.optimize.race import Race
from tokenmill.optimize.results import (
    CHOSEN,
    FAILED,
    PASSED,
    SLOWER,
    TIED,
    UNLIKELY,
    UNTRIED,
    CandidateResult,
    Prediction,
)
from tokenmill.optimize.serving_round import ServingRound, comparable_latencies, measure_stored
from tokenmill.optimize.settings import SettingsRound
from tokenmill.optimize.space import Space
from tokenmill.optimize.store import Store
from tokenmill.optimize.trial import Trials

Say = Callable[[str, float], None]  # what is being done, and the fraction of the run that is done
_FIRST_ROUND, _PROOFS, _SETTINGS, _NARROWING = 0.5, 0.7, 0.82, 0.88  # of the time, at most, by the end of each
_LATEST = 1.4  # of the time: until then a first one that keeps quality and latency is looked for
_AT_LEAST = 3  # candidates that are tried however slow the machine is: a late answer is better than none
_PROVEN = 3  # where there is time: a second and a third choice
_CALIBRATION_TOKENS = 8192  # that a calibrated candidate runs through the model
_CALIBRATION_PASSES = 2.0
_AT_LOAD = "at load: "


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured. `runs`: cycles of the final, up to `max_runs` where they cannot tell finalists apart; texts
    in windows of `context` tokens."""

    seconds: float = 480.0
    runs: int = 5
    short_windows: int = 4
    windows: int = 48
    context: int = 256
    max_runs: int = 12
    finalists: int = 4


@dataclass(slots=True)
class Search:
    """Everything the loop works with, and what it has found."""

    lab: Laboratory
    store: Store
    space: Space
    effort: Effort
    limits: Limits
    predictor: Predicts | None
    say: Say
    objectives: bool = False  # of latency: finalists are replayed, and only those that meet them are accepted
    quality_off: bool = False
    drafts_pay: bool = True
    measures_today: bool = False  # the stored file on our engine is what is served today
    budget: TimeBudget | None = None  # that began with the job; None: begins now
    results: dict[str, CandidateResult] = field(default_factory=dict)
    baseline: CandidateResult | None = None
    baseline_variants: list[CandidateResult] = field(default_factory=list)
    today: CandidateResult | None = None
    chosen: str = ""
    tied: list[str] = field(default_factory=list)
    margin: float = 0.0  # of its cost, by which another finalist may be cheaper than the choice
    trials: Trials = field(init=False)
    serving: ServingRound = field(init=False)
    halving: Halving = field(init=False)
    pruning: Pruning = field(init=False)
    _chosen_cost: float = float("inf")  # by throughput, over the baseline's
    _unproven: list[CandidateResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        budget = self.budget or TimeBudget(self.effort.seconds)
        self.trials = Trials(self.lab, self.store, budget, self.limits, self.objectives, self.quality_off)
        self.serving = ServingRound(self.trials)
        repeats = self.effort.max_runs // 2
        self.halving = Halving(
            self.trials, self.effort.finalists, _NARROWING, repeats, lambda what: self.say(what, 0.82)
        )
        self.pruning = Pruning(self.results, self.predictor, self.limits, self._predicted_as)

    @property
    def out_of_time(self) -> bool:
        return self.trials.out_of_time

    @property
    def unproven(self) -> list[str]:
        """Names of those that were measured to be cheaper than the choice and not proven in the time given."""
        cost = self._chosen_cost
        cheaper = [each for each in self._unproven if each.speed and each.speed.cost_ratio < cost]
        return [each.name for each in sorted(cheaper, key=lambda each: (each.speed.cost_ratio, each.name))]  # type: ignore[union-attr]

    def run(self) -> None:
        try:
            self.trials.record_kill()
            order = self._predict()
            self._measure_baseline()
            self._first_round(order)
            self._measure_references()
            proven = self._prove_cheapest()
            while reopened := self.pruning.reopen(proven):
                self._first_round(reopened)
                proven = self._prove_cheapest()
            proven = proven or (self._other_batches() if self.objectives else [])
            if proven:
                proven += self._try_settings(proven)
            while proven and not self.chosen:  # again without those that failed in the final
                finalists = self._finalists(proven)
                if not finalists:
                    break
                self._final(finalists)
                proven = [each for each in proven if each.verdict != FAILED] if not self.chosen else []
        finally:
            self.lab.close()

    # --- before anything is quantized ---

    def _predict(self) -> list[str]:
        """Weights in the order to try them; those that the prediction rules out are recorded and skipped."""
        self.say("predicting", 0.0)
        predictions: dict[str, Prediction] = {}
        for name, candidate in self._weight_candidates().items():
            result = self.add(candidate, name=name)
            try:
                if self.predictor is not None:
                    result.prediction = predictions[name] = self.predictor.predict(self._predicted_as(name))
            except UserError as error:
                result.verdict, result.reason = FAILED, str(error)
        if self.predictor is None:
            return sorted(self.results, key=lambda name: name in self.space.calibrated)
        limit = float("inf") if self.quality_off else self.limits.quality_loss
        for name, own in predictions.items():
            if len(predictions) == 1 or name == self.space.stored:
                continue
            slow = too_slow(name, predictions)
            if reason := too_harmful(own, limit) or slow:
                self.results[name].verdict, self.results[name].reason = UNLIKELY, reason
                self.pruning.too_slow |= {name} if reason == slow else set()
        likely = {name: each for name, each in predictions.items() if self.results[name].verdict != UNLIKELY}
        return rank_candidates(likely, limit, self.space.calibrated, self.space.by_blocks)

    def _weight_candidates(self) -> dict[str, Candidate]:
        """By name. Rounding at load is an option of the engine on the baseline's weights."""
        kv, tokens = self.space.default_kv, self.space.batch_tokens[0]
        found = {name: Candidate(name, kv, tokens) for name in self.space.weights}
        for kind in self.space.rounded_at_load:
            plain = Candidate(self.space.float_weights[0], kv, tokens, options={"quantization": kind})
            found[_AT_LOAD + kind] = plain
        return found

    def _predicted_as(self, name: str) -> str:
        kind = name.removeprefix(_AT_LOAD)
        return name if kind == name else self.space.rounded_at_load[kind]

    def _measure_baseline(self) -> None:
        contest = BaselineContest(self.trials, self.space, self._float_speedup, self.say)
        try:
            self.baseline = contest.run()
        finally:
            self.baseline_variants = contest.tried

    def _float_speedup(self, name: str) -> float:
        try:
            return self.predictor.predict(name).speedup if self.predictor else 1.0
        except UserError:
            return 0.0

    # --- the rounds ---

    def _first_round(self, order: list[str]) -> None:
        base = self._baseline
        for number, name in enumerate(order):
            result = self.results[name]
            result.kv, result.batch_tokens = base.kv, base.batch_tokens
            if name.startswith(_AT_LOAD):
                result.weights = base.weights
            known = self.trials.is_looked_at(name)
            if not known and number >= _AT_LEAST and self.trials.budget.used > _FIRST_ROUND:
                result.reason, self.trials.out_of_time = "no time was left to try it", True
                continue
            if not known and (reason := self.pruning.hopeless(result, self._measured())):
                result.verdict, result.reason = UNLIKELY, reason
                continue
            calibrated = name in self.space.calibrated
            seconds = self._time_to_build(calibrated, at_least=number < _AT_LEAST)
            if not known and calibrated and self._forecast_calibration() > seconds:
                result.reason = f"making it is forecast to take {self._forecast_calibration():.0f} s: too long for now"
                self.trials.out_of_time = True
                continue
            self.say(f"trying {name}", 0.15 + 0.4 * number / len(order))
            kind = "calibrated build" if calibrated else "build"
            if not self.trials.attempt(result, self.trials.look, base, result, seconds, kind):
                self.say(f"{name}: {result.reason}", 0.15 + 0.4 * number / len(order))
            self.pruning.settle(base, self._measured())

    def _time_to_build(self, calibrated: bool, at_least: bool) -> float:
        """Seconds that making one candidate may take: a slow one must not take the time of all others."""
        left = self.trials.budget.left_until(_FIRST_ROUND)
        return float("inf") if at_least and not calibrated else left / 2 if calibrated else left

    def _forecast_calibration(self) -> float:
        rate = self._baseline.speed.total_tok_s if self._baseline.speed else 0.0
        unknown = _CALIBRATION_PASSES * _CALIBRATION_TOKENS / rate if rate else 0.0
        return self.trials.budget.expected("calibrated build", unknown)

    def _prove_cheapest(self) -> list[CandidateResult]:
        """Those that are shown to keep their quality, cheapest first. One that fails does not use up a place."""
        trials = self.trials
        passed = [each for each in self._measured() if each.verdict == PASSED]
        waiting = [each for each in self._measured() if each.verdict == UNTRIED]
        for result in sorted(waiting, key=lambda each: (trials.estimate(each).log_cost, each.name)):
            best = min((trials.estimate(each).high for each in passed), default=float("inf"))
            could_win = trials.estimate(result).low < best
            if not could_win and len(passed) >= _PROVEN:
                result.verdict, result.reason = SLOWER, f"costs more than {passed[0].name}, which kept its quality"
                continue
            late = trials.budget.used > (_PROOFS if passed else _LATEST)
            if late and not trials.is_judged(result):
                result.reason, trials.out_of_time = "no time was left to prove its quality", True
                self._unproven.append(result)
                continue
            done = 0.55 + 0.05 * min(3, len(passed))
            self.say(f"proving {result.name}", done)
            if trials.attempt(result, trials.accept, self._baseline, result):
                passed.append(result)
            else:
                self.say(f"{result.name}: {result.reason}", done)
        return sorted(passed, key=lambda each: (trials.estimate(each).log_cost, each.name))

    def _try_settings(self, proven: list[CandidateResult]) -> list[CandidateResult]:
        settings = SettingsRound(
            self.trials,
            self.space,
            self._baseline,
            self._add_variant,
            _SETTINGS,
            lambda what: self.say(what, 0.75),
            self.drafts_pay,
        )
        try:
            others = [each for each in self._measured() if each.verdict in (SLOWER, UNTRIED)]
            return settings.run(proven, others)
        finally:
            self._unproven += settings.unproven

    def _measure_references(self) -> None:
        """The stored file beside the baseline, and both under the arrivals."""
        self.say("measuring what it is compared with", 0.54)
        if self.measures_today:
            tried = self.results.get(self.space.stored)
            self.today = measure_stored(self.trials, self.space, self._baseline, tried)
        if self.objectives:
            self.serving.measure_reference(self._baseline, "the baseline")
            if self.today is not None and self.today is not self._baseline and self.today.verdict != FAILED:
                self.serving.measure_reference(self.today, "the stored file")

    def _other_batches(self) -> list[CandidateResult]:
        """Where latency refused all: the cheapest that keep their quality, with other batch sizes."""
        kept = [each for each in self._measured() if each.latency is not None and not each.latency.objective_met]
        accepted: list[CandidateResult] = []
        for size in self.space.batch_tokens:
            for result in self.halving.in_question(kept):
                variant = self._add_variant(replace(candidate_of(result), batch_tokens=size), result)
                self.say(f"trying {variant.name}", 0.7)
                is_new = variant.verdict == UNTRIED
                if is_new and self.trials.attempt(variant, self._look_and_accept, variant):
                    accepted.append(variant)
        return accepted

    def _look_and_accept(self, result: CandidateResult) -> bool:
        limit = self.trials.budget.left_until(1)
        return self.trials.look(self._baseline, result, limit, "variant") and self.trials.accept(self._baseline, result)

    def _finalists(self, proven: list[CandidateResult]) -> list[CandidateResult]:
        left = self.halving.narrow(self._baseline, self.serving.with_most_goodput(proven))
        if not self.objectives:
            return left
        self.say("searching the rates that finalists sustain", 0.88)
        return self.serving.sustain(left)

    def _final(self, finalists: list[CandidateResult]) -> None:
        effort = self.effort
        race = Race(
            self.lab,
            self.trials.budget,
            self._baseline,
            finalists,
            effort.runs,
            max(effort.runs, effort.max_runs),
            lambda number, of: self.say(f"final, run {number + 1} of {max(of, number + 1)}", 0.9),
            self.trials.record_failure,
        )
        try:
            race.run()
        finally:
            self.trials.out_of_time |= race.out_of_time
            if race.runs[""] and race.finished:
                self._conclude(race)

    def _conclude(self, race: Race) -> None:
        base = race.runs[""]
        self._baseline.speed = compare_speed(base, base)
        costs: dict[str, float] = {}
        for result in race.finished:
            count = min(len(base), len(race.runs[result.name]))
            speed = compare_speed(base[:count], race.runs[result.name][:count])
            costs[result.name] = speed.cost_ratio
            result.speed = with_goodput(speed, *comparable_latencies(self._baseline, result))
            result.rounds = 2
        chosen, self.tied = race.winner()
        if chosen.speed is not None and chosen.speed.cost_ratio > 1:
            self._keep_baseline(race.finished)
            return
        self.margin = race.margin(chosen)
        self.chosen, self._chosen_cost = chosen.name, costs[chosen.name]
        for result in race.finished:
            tied = result.name in self.tied
            result.verdict = CHOSEN if result is chosen else TIED if tied else PASSED
            result.reason = {
                CHOSEN: "",
                TIED: f"costs the same as {self.chosen} within the measurement's accuracy",
                PASSED: f"costs more than {self.chosen}",
            }[result.verdict]

    def _keep_baseline(self, finalists: list[CandidateResult]) -> None:
        """Nothing that keeps its quality is cheaper than the unquantized weights: those are the choice."""
        base = self._baseline
        for result in finalists:
            result.verdict, result.reason = PASSED, f"costs more than {base.name}"
        self.results[base.name] = base
        self.chosen, self.tied, self._chosen_cost = base.name, [base.name], 1.0
        base.verdict, base.reason = CHOSEN, ""

    # --- the record ---

    def add(self, candidate: Candidate, name: str = "") -> CandidateResult:
        key = name or candidate.name
        if key not in self.results:
            self.results[key] = candidate.result(key)
        return self.results[key]

    def _add_variant(self, candidate: Candidate, weights: CandidateResult) -> CandidateResult:
        result = self.add(candidate)
        result.prediction, result.artefact = weights.prediction, weights.artefact
        return result

    def _measured(self) -> list[CandidateResult]:
        return [each for each in self.results.values() if self.trials.timed(each)]

    @property
    def _baseline(self) -> CandidateResult:
        assert self.baseline is not None
        return self.baseline
