"""A laboratory with known costs, losses, build times, latencies and failures, a clock of its own, and noise.

For tests of the loop: nothing is computed, every measurement moves the clock. Runs are kept in the store as the real
laboratory keeps them, so that a second search finds them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from tokenmill.optimize.artefacts import NotEnoughTimeError
from tokenmill.optimize.candidates import candidate_of
from tokenmill.optimize.results import (
    Artefact,
    CandidateResult,
    Latency,
    Percentiles,
    Prediction,
    Proof,
    Quality,
    Run,
    Sustained,
)
from tokenmill.optimize.store import Store

BASELINE = "F16"
TIME_LIMIT = 60.0  # seconds after which the laboratory ends a candidate that hangs


class InjectedError(RuntimeError):
    """`candidate`: whose fault it is, as the real laboratory says."""

    def __init__(self, message: str, candidate: str) -> None:
        super().__init__(message)
        self.candidate = candidate


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Truth:
    """`cost`: of a token over the baseline's. `loss`: added up over weights and KV. `fails`: a kind of measurement."""

    cost: float
    loss: float = 0.0
    build_s: float = 2.0
    check_s: float = 1.0
    latency_ok: bool = True
    fails: str = ""  # "build" | "pair" | "check" | "prove" | "cycle"
    hangs: bool = False
    bits: float = 0.0  # 0: the prediction does not know


@dataclass(slots=True)
class InjectedLaboratory:
    """Costs of weights, KV dtypes and batch sizes multiply, losses add up."""

    weights: dict[str, Truth]
    kv: dict[str, Truth]
    store: Store
    limit: float
    seed: int
    noise: float = 0.05
    clock: Clock = field(default_factory=Clock)
    before: Callable[[str], None] = lambda _what: None  # called with every measurement that is really made
    calls: list[str] = field(default_factory=list)
    built: set[str] = field(default_factory=set)

    def cost(self, result: CandidateResult) -> float:
        return self.weights[result.weights].cost * self.kv[result.kv].cost

    def loss(self, result: CandidateResult) -> float:
        return self.weights[result.weights].loss + self.kv[result.kv].loss

    def latency_ok(self, result: CandidateResult) -> bool:
        return self.weights[result.weights].latency_ok and self.kv[result.kv].latency_ok

    def build(self, result: CandidateResult, seconds: float) -> Artefact:
        truth = self.weights[result.weights]
        if result.weights not in self.built:
            if truth.build_s > seconds:
                raise NotEnoughTimeError("it would take longer", "give more --minutes")
            self._work("build", result, truth.build_s)
            self.built.add(result.weights)
        return Artefact(result.weights, 1, 4.0, truth.build_s, "make it")

    def pair(self, kind: str, baseline: CandidateResult, result: CandidateResult) -> tuple[list[Run], list[Run]]:
        cycles = self.store.recall(kind, _name(result))
        if cycles is None:
            self._work("pair", result, 3.0, kind)
            cycles = [[self._run(each, f"{kind} {number}") for each in (baseline, result)] for number in range(2)]
            self.store.remember(kind, _name(result), cycles)
        return [Run(**cycle[0]) for cycle in cycles], [Run(**cycle[1]) for cycle in cycles]

    def cycle(self, contenders: Sequence[CandidateResult], number: int) -> list[Run]:
        key = self._cycle_key(contenders, number)
        records = self.store.recall("final", key)
        if records is None:
            for each in contenders:
                self._work("cycle", each, 2.0, str(number))
            records = [self._run(each, f"cycle {number}") for each in contenders]
            self.store.remember("final", key, records)
        return [Run(**record) for record in records]

    def has_cycle(self, contenders: Sequence[CandidateResult], number: int) -> bool:
        return self.store.recall("final", self._cycle_key(contenders, number)) is not None

    def check(self, baseline: CandidateResult, result: CandidateResult) -> Quality:
        del baseline
        self._work("check", result, self.weights[result.weights].check_s + self.kv[result.kv].check_s)
        return _quality(self.loss(result), 0.004)

    def prove(self, baseline: CandidateResult, result: CandidateResult) -> Proof:
        del baseline
        self._work("prove", result, 8.0)
        loss = self.loss(result)
        return Proof(_quality(loss, 0.0005), refusals=("it loses too much",) if loss > self.limit else ())

    def replay(self, result: CandidateResult) -> Latency:
        self._work("replay", result, 10.0)
        return self._latency(result, 100.0 if self.latency_ok(result) else 20.0)

    def _latency(self, result: CandidateResult, goodput: float) -> Latency:
        times = Percentiles(10, 10, 10, 10, 10)
        fine = self.latency_ok(result)
        return Latency(10, 0, 1.0, 10.0, times, times, times, 100.0, goodput, 1.0, fine, "" if fine else "TTFT p95")

    def sustain(self, result: CandidateResult) -> Sustained:
        self._work("sustain", result, 10.0)
        goodput = 100.0 / self.cost(result) if self.latency_ok(result) else 20.0
        return Sustained(self._latency(result, goodput), goodput, 1.05 * goodput)

    def close(self) -> None:
        pass

    def _work(self, what: str, result: CandidateResult, seconds: float, detail: str = "") -> None:
        self.before(f"{what} {_name(result)} {detail}")
        self.calls.append(f"{what} {_name(result)} {detail}")
        for truth in (self.weights[result.weights], self.kv[result.kv]):
            if truth.fails == what:
                self.clock.now += TIME_LIMIT if truth.hangs else 1.0
                raise InjectedError("it hangs" if truth.hangs else "it crashed", result.name)
        self.clock.now += seconds

    def _run(self, result: CandidateResult, what: str) -> dict[str, float]:
        random_numbers = random.Random(f"{self.seed} {_name(result)} {what}")
        rate = 100.0 / self.cost(result) * math.exp(random_numbers.gauss(0, self.noise))
        return asdict(Run(1.0, rate / 2, rate, 10.0, 5.0))

    @staticmethod
    def _cycle_key(contenders: Sequence[CandidateResult], number: int) -> str:
        return f"{number} {' '.join(map(_name, contenders))}"


@dataclass(slots=True)
class InjectedPredictor:
    """The true cost with an error of at most `error`."""

    weights: dict[str, Truth]
    seed: int
    error: float = 0.08

    def predict(self, weights: str) -> Prediction:
        truth = self.weights[weights]
        wrong = random.Random(f"{self.seed} {weights}").uniform(1 - self.error, 1 + self.error)
        return Prediction(wrong / truth.cost, 1, 0.0, 0.01, "injected", bits=truth.bits)

    def settle(self, baseline: str, speedups: Mapping[str, float]) -> None:
        pass


def _name(result: CandidateResult) -> str:
    return candidate_of(result).name


def _quality(loss: float, error: float) -> Quality:
    return Quality(loss, loss - 2 * error, loss + 2 * error, loss, 3 * loss, 1 - loss, 10.0, 10.0, 1000, 0, error)
