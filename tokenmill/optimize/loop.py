"""The closed loop: predict, measure the baseline, try the candidates round by round, choose. The steps are in other
modules; this one has their order, the time budget and the record of results.

Rounds: (1) every promising weight choice is built, checked on a short text and timed once; (2) the cheapest half must
prove its quality on the whole text; (3) KV dtypes, batch sizes and drafters are tried on the leader; (4) the finalists
alternate with the baseline. What fails is recorded with its reason. Called by `tokenmill optimize`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.optimize.artefacts import ArtefactCache, NotEnoughTimeError
from tokenmill.optimize.baseline import choose_baseline
from tokenmill.optimize.candidates import Candidate, batch_choices, parse_weights, ready_drafters
from tokenmill.optimize.contender import ContenderError
from tokenmill.optimize.contender_pool import ResourceLimits
from tokenmill.optimize.evidence import choose, compare_speed, survivors
from tokenmill.optimize.machine_laboratory import MachineLaboratory
from tokenmill.optimize.predict import Predictor, cannot_win, rank_candidates
from tokenmill.optimize.quality import QualityPlan, short_text_refusal
from tokenmill.optimize.results import (
    CHOSEN,
    FAILED,
    HARMED,
    PASSED,
    SLOWER,
    TIED,
    UNLIKELY,
    CandidateResult,
    Prediction,
    Run,
)
from tokenmill.optimize.store import Store
from tokenmill.optimize.traffic import Traffic
from tokenmill.resolution import DEVICE_DEFAULTS

Say = Callable[[str, float], None]  # what is being done, and the fraction of the run that is done
_FIRST_ROUND_SHARE, _PROOF_SHARE, _SETTINGS_SHARE = 0.55, 0.75, 0.85  # of the time, at most, by the end of each
_FINALISTS = 3
_AT_LEAST = 3  # candidates that are tried however slow the machine is: a late answer is better than none


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured. `runs`: cycles of the final; texts in windows of `context` tokens."""

    seconds: float = 480.0
    runs: int = 5
    short_windows: int = 4
    windows: int = 48
    context: int = 256


@dataclass(slots=True)
class Search:
    """Everything the loop works with, and what it has found."""

    artefacts: ArtefactCache
    store: Store
    traffic: Traffic
    text: str
    engine: EngineConfig  # context and concurrency of the workload
    effort: Effort
    limit: float  # of quality loss
    weights: list[str]
    kv: list[str]
    predictor: Predictor | None
    say: Say
    began: float = field(default_factory=time.monotonic)
    results: dict[str, CandidateResult] = field(default_factory=dict)
    baseline: CandidateResult | None = None
    baseline_variants: list[CandidateResult] = field(default_factory=list)
    chosen: str = ""
    tied: list[str] = field(default_factory=list)
    out_of_time: bool = False
    table: MachineLaboratory = field(init=False)

    def __post_init__(self) -> None:
        effort = self.effort
        plan = QualityPlan(self.text, effort.context, effort.short_windows, effort.windows, self.limit, None)
        limits = ResourceLimits.within(effort.seconds)
        self.table = MachineLaboratory(self.store, self.traffic, self.engine, self.artefacts, plan, limits)

    @property
    def used(self) -> float:
        """Fraction of the time budget that has passed."""
        return (time.monotonic() - self.began) / self.effort.seconds

    def run(self) -> None:
        try:
            self._record_crash()
            order = self._predict()
            self.baseline, self.baseline_variants = choose_baseline(self.table, self.say)
            self._first_round(order)
            leaders = self._proofs()
            if leaders:
                leaders += self._settings(leaders[0])
                self._final(leaders[: _FINALISTS + 1])
        finally:
            self.table.close()

    # --- before anything is quantized ---

    def _record_crash(self) -> None:
        name = self.store.interrupted_attempt
        if name is not None:
            self.store.remember("failed", name, "an earlier run was killed while trying it: out of memory?")
            self.store.forget_attempt()

    def _predict(self) -> list[str]:
        """Weight choices in the order to try them; those that the planner rules out are recorded and skipped."""
        self.say("predicting", 0.0)
        first_kv = self.table.default_kv
        predictions: dict[str, Prediction] = {}
        for name in self.weights:
            candidate = Candidate(name, first_kv, self.engine.decided("batch_tokens"))
            result = self._result(candidate)
            try:
                if self.predictor is not None:
                    result.prediction = predictions[name] = self.predictor.predict(parse_weights(name))
            except UserError as error:
                result.verdict, result.reason = FAILED, str(error)
        if self.predictor is None:
            return [name for name in self.weights if self.results[name].verdict != FAILED]
        for name in list(predictions):
            reason = cannot_win(name, predictions, self.limit) if len(self.weights) > 1 else ""
            if reason:
                self.results[name].verdict, self.results[name].reason = UNLIKELY, reason
        open_ones = {name: each for name, each in predictions.items() if self.results[name].verdict != UNLIKELY}
        calibrated = {name: _needs_data(name) for name in open_ones}
        return rank_candidates(open_ones, self.limit, calibrated)

    # --- the rounds ---

    def _first_round(self, order: list[str]) -> None:
        assert self.baseline is not None
        for number, name in enumerate(order):
            result = self.results[name]
            result.kv, result.batch_tokens = self.baseline.kv, self.baseline.batch_tokens
            if number >= _AT_LEAST and self.used > _FIRST_ROUND_SHARE and not self._known(result):
                result.reason, self.out_of_time = "no time was left to try it", True
                continue
            self.say(f"trying {name}", 0.2 + 0.35 * number / len(order))
            self._try(result, self._first_look)

    def _proofs(self) -> list[CandidateResult]:
        """The cheaper half that is shown to keep its quality, cheapest first. Goes further down the list when fewer
        than the finalists pass: a cheap candidate that fails does not use up a place."""
        costs = {name: result.speed.cost_ratio for name, result in self.results.items() if result.speed}
        keep = set(survivors(costs, _FINALISTS))
        passed: list[CandidateResult] = []
        for name in sorted(costs, key=lambda each: (costs[each], each)):
            result = self.results[name]
            if len(passed) >= _FINALISTS or (name not in keep and len(passed) >= 2):
                result.verdict = SLOWER
                result.reason = f"dropped after one round: {len(passed)} cheaper ones kept their quality"
                continue
            if passed and self.used > _PROOF_SHARE and not self.table.has_proof(self._baseline, result):
                result.reason, self.out_of_time = "no time was left to prove its quality", True
                continue
            self.say(f"proving {name}", 0.55 + 0.2 * len(passed) / _FINALISTS)
            if self._try(result, self._prove):
                passed.append(result)
        return passed

    def _settings(self, leader: CandidateResult) -> list[CandidateResult]:
        """KV dtypes, batch sizes and drafters on the leader; what is cheaper and keeps the quality goes to the final.

        Drafters are tried only where prompts are text: acceptance on random tokens says nothing about real ones.
        """
        better: list[CandidateResult] = []
        prompts = self.traffic.input_tokens * self.engine.decided("concurrency")
        variants = [Candidate(leader.weights, kv, leader.batch_tokens) for kv in self.kv if kv != leader.kv]
        variants += [
            Candidate(leader.weights, leader.kv, size) for size in batch_choices(prompts) if size != leader.batch_tokens
        ]
        if self.traffic.is_text:
            settings = (leader.weights, leader.kv, leader.batch_tokens)
            variants += [Candidate(*settings, speculate=name) for name in ready_drafters()]
        assert leader.speed is not None
        for number, variant in enumerate(variants):
            result = self._result(variant, variant.name)
            result.prediction, result.artefact = leader.prediction, leader.artefact
            if self.used > _SETTINGS_SHARE and not self._known(result):
                result.reason, self.out_of_time = "no time was left to try it", True
                continue
            self.say(f"trying {variant.name}", 0.75 + 0.1 * number / len(variants))
            if not self._try(result, self._first_look) or result.speed is None:
                continue
            if result.speed.cost_ratio >= leader.speed.cost_ratio:
                result.verdict, result.reason = SLOWER, f"no cheaper than {leader.name}"
            elif self._try(result, self._prove):
                better.append(result)
        better.sort(key=lambda each: each.speed.cost_ratio if each.speed else 1.0)
        return better[:1]

    def _final(self, finalists: list[CandidateResult]) -> None:
        """A finalist that fails is recorded and left out; the others start again."""
        while finalists:
            try:
                return self._run_final(finalists)
            except ContenderError as error:
                failed = next((each for each in finalists if each.name == error.candidate), None)
                if failed is None:
                    raise
                failed.verdict, failed.reason = FAILED, _explained(error)
                self.store.remember("failed", failed.name, failed.reason)
                finalists = [each for each in finalists if each is not failed]
        return None

    def _run_final(self, finalists: list[CandidateResult]) -> None:
        assert self.baseline is not None
        by_name = {each.name: each for each in finalists}
        everyone = [self.baseline, *finalists]
        runs: dict[str, list[Run]] = {"": [], **{name: [] for name in by_name}}
        try:
            for cycle in range(self.effort.runs):
                if self.used > 1 and cycle >= 3 and not self.table.has_cycle(everyone, cycle):
                    self.out_of_time = True
                    break
                self.say(f"final, run {cycle + 1} of {self.effort.runs}", 0.85 + 0.15 * cycle / self.effort.runs)
                for name, run in zip(runs, self.table.cycle(everyone, cycle), strict=True):
                    runs[name].append(run)
        finally:
            if runs[""]:
                self._conclude(by_name, runs)

    def _conclude(self, finalists: dict[str, CandidateResult], runs: dict[str, list[Run]]) -> None:
        assert self.baseline is not None
        count = min(map(len, runs.values()))
        if not count:
            return
        base = runs[""][:count]
        self.baseline.speed = compare_speed(base, base)
        for name, result in finalists.items():
            result.speed, result.rounds = compare_speed(base, runs[name][:count]), 2
        contest = {name: runs[name][:count] for name in finalists}
        divergence = {name: result.quality.kld_mean for name, result in finalists.items() if result.quality}
        self.chosen, self.tied = choose(contest, divergence)
        for name, result in finalists.items():
            result.verdict = CHOSEN if name == self.chosen else TIED if name in self.tied else PASSED
            result.reason = {
                CHOSEN: "",
                TIED: f"costs the same as {self.chosen} within the measurement's accuracy",
                PASSED: f"costs more than {self.chosen}",
            }[result.verdict]

    # --- one candidate ---

    def _result(self, candidate: Candidate, key: str = "") -> CandidateResult:
        key = key or candidate.weights
        if key not in self.results:
            c = candidate
            self.results[key] = CandidateResult(key, c.weights, c.kv, c.batch_tokens, c.speculate)
        return self.results[key]

    def _try(self, result: CandidateResult, work: Callable[[CandidateResult], bool]) -> bool:
        """Run `work` on a candidate; False if it failed. A failure is recorded and does not end the search."""
        failed = self.store.recall("failed", result.name)
        if failed:
            result.verdict, result.reason = FAILED, failed
            return False
        try:
            with self.store.attempt(result.name):
                return work(result)
        except NotEnoughTimeError as error:
            result.reason, self.out_of_time = str(error), True
        except Exception as error:  # any exception: a registered method or store may be third-party code
            result.verdict, result.reason = FAILED, _explained(error)
            self.store.remember("failed", result.name, result.reason)
        return False

    def _first_look(self, result: CandidateResult) -> bool:
        left = self.effort.seconds * max(0.0, _FIRST_ROUND_SHARE - self.used)
        result.artefact = self.table.build(result, left)
        if not self._short_check(result):
            return False
        self._time(result, "first")
        result.rounds = 1
        return True

    def _known(self, result: CandidateResult) -> bool:
        return bool(self.store.recall("failed", result.name)) or self.table.has_check(self._baseline, result)

    def _short_check(self, result: CandidateResult) -> bool:
        result.divergence = self.table.check(self._baseline, result)
        result.reason = short_text_refusal(result.divergence, self.limit)
        if result.reason:
            result.verdict = HARMED
        return not result.reason

    def _prove(self, result: CandidateResult) -> bool:
        proof = self.table.prove(self._baseline, result)
        result.quality, result.reason = proof.quality, "; ".join(proof.refusals)
        result.verdict = HARMED if result.reason else PASSED
        return not result.reason

    def _time(self, result: CandidateResult, kind: str) -> None:
        base, runs = self.table.pair(kind, self._baseline, result)
        result.speed = compare_speed(base, runs)

    @property
    def _baseline(self) -> CandidateResult:
        assert self.baseline is not None
        return self.baseline


def _needs_data(name: str) -> bool:
    choice = parse_weights(name)
    return choice.importance or bool(choice.method)


def _explained(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


def workload_engine(engine: EngineConfig, traffic: Traffic, concurrency: int) -> EngineConfig:
    """The engine configuration that the workload needs."""
    usual = DEVICE_DEFAULTS["cpu"]
    engine = engine.fill("the longest request of the traffic", context=traffic.longest)
    return replace(engine, concurrency=concurrency).fill(
        "starting point of the search", batch_tokens=usual.batch_tokens
    )
