"""The laboratory of this process: builds artefacts, loads engines when a measurement needs them, stores timed runs.

A run that is in the store is not repeated, and nothing is loaded for it. At most the contenders of one cycle are in
memory. Called by the loop through `Laboratory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tokenmill.bench.prompts import SyntheticRequest
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.evaluate.divergence import DivergenceReport
from tokenmill.optimize.artefacts import ArtefactCache
from tokenmill.optimize.candidates import candidate_of, parse_weights
from tokenmill.optimize.evidence import Limits
from tokenmill.optimize.loop import Effort
from tokenmill.optimize.measure import Contender, QualityText, as_quality, refusal, take_turns
from tokenmill.optimize.results import Artefact, CandidateResult, Latency, Proof, Quality, Run
from tokenmill.optimize.store import Store
from tokenmill.optimize.traffic import Traffic

_FIRST_PAIRS = 2
_CLEAR = 1.5  # beyond this ratio one run is enough
_FINAL_LENGTH = 2  # requests per slot in the final; the first round has one


class BenchTable:
    def __init__(
        self,
        store: Store,
        traffic: Traffic,
        engine: EngineConfig,
        artefacts: ArtefactCache,
        text: str,
        effort: Effort,
        limits: Limits,
    ) -> None:
        self.store = store
        self.traffic = traffic
        self.engine = engine
        self.artefacts = artefacts
        self._text = text
        self._effort = effort
        self._limits = limits
        self._loaded: dict[str, Contender] = {}
        self._references: dict[int, str] = {}

    def build(self, result: CandidateResult, seconds: float) -> Artefact:
        choice = parse_weights(result.weights)
        return self.artefacts.find(choice) or self.artefacts.make(choice, seconds, lambda *_: None)

    def config(self, result: CandidateResult) -> EngineConfig:
        settings = {
            "kv_cache_dtype": result.kv,
            "batch_tokens": result.batch_tokens,
            "speculate": result.speculate,
            **result.options,
        }
        return replace(self.engine, **settings)

    def path(self, result: CandidateResult) -> Path:
        return self.artefacts.path(parse_weights(result.weights))

    def pair(self, kind: str, baseline: CandidateResult, result: CandidateResult) -> tuple[list[Run], list[Run]]:
        """(baseline runs, candidate runs): one short run of each, a second where one cannot tell them apart."""
        cycles = self.store.recall(kind, result.name)
        if cycles is None:
            contenders = self._load([baseline, result])
            cycles = []
            while len(cycles) < _FIRST_PAIRS:
                base, candidate = take_turns(contenders, self._requests(1, len(cycles)))
                cycles.append([asdict(base), asdict(candidate)])
                if not 1 / _CLEAR < base.total_tok_s / candidate.total_tok_s < _CLEAR:
                    break
            self.store.remember(kind, result.name, cycles)
        return [Run(**cycle[0]) for cycle in cycles], [Run(**cycle[1]) for cycle in cycles]

    def cycle(self, contenders: Sequence[CandidateResult], number: int) -> list[Run]:
        """One long run of each contender."""
        key = self._cycle_key(contenders, number)
        records = self.store.recall("final", key)
        if records is None:
            # Every other cycle runs in reverse, so that the position in the cycle favours nobody.
            engines = self._load(contenders)
            direction = -1 if number % 2 else 1
            runs = take_turns(engines[::direction], self._requests(_FINAL_LENGTH, 1000 + number))[::direction]
            records = [asdict(run) for run in runs]
            self.store.remember("final", key, records)
        return [Run(**run) for run in records]

    def has_cycle(self, contenders: Sequence[CandidateResult], number: int) -> bool:
        return self.store.recall("final", self._cycle_key(contenders, number)) is not None

    def check(self, baseline: CandidateResult, result: CandidateResult) -> Quality:
        text = QualityText(self._text, self._effort.context, self._effort.short_windows)
        return as_quality(self._compare(text, baseline, result))

    def prove(self, baseline: CandidateResult, result: CandidateResult) -> Proof:
        text = QualityText(self._text, self._effort.context, self._effort.windows)
        report = self._compare(text, baseline, result)
        reason = refusal(report, self._limits.quality_loss)
        return Proof(as_quality(report), refusals=(reason,) if reason else ())

    def replay(self, result: CandidateResult) -> Latency:
        raise UserError(f"{result.name}: arrivals are not replayed here", "leave the latency objectives out")

    def _compare(self, text: QualityText, baseline: CandidateResult, result: CandidateResult) -> DivergenceReport:
        """The candidate's predictions against the baseline's, each with its own KV dtype."""
        self._unload(_engine_name(result))  # scoring loads an engine of its own
        path = self.path(baseline)
        if text.max_windows not in self._references:
            self._references[text.max_windows] = text.reference(path, self._scoring(baseline))
        return text.compare(self.path(result), self._references[text.max_windows], self._scoring(result))

    def close(self) -> None:
        for contender in self._loaded.values():
            contender.close()
        self._loaded.clear()

    def _scoring(self, result: CandidateResult) -> EngineConfig:
        return replace(self.config(result), prefix_caching=False, speculate="off", concurrency=None)

    def _load(self, results: Sequence[CandidateResult]) -> list[Contender]:
        """The engines of these candidates: loads those that are missing, unloads all others."""
        needed = {_engine_name(result): result for result in results}
        for name in [name for name in self._loaded if name not in needed]:
            self._unload(name)
        for name, result in needed.items():
            if name not in self._loaded:
                self._loaded[name] = Contender(self.path(result), self.config(result))
        return [self._loaded[name] for name in needed]

    def _unload(self, name: str) -> None:
        if name in self._loaded:
            self._loaded.pop(name).close()

    def _requests(self, per_slot: int, run: int) -> list[SyntheticRequest]:
        return self.traffic.draw(per_slot * self.engine.decided("concurrency"), run)

    @staticmethod
    def _cycle_key(contenders: Sequence[CandidateResult], number: int) -> str:
        return f"{number}:{','.join(_engine_name(each) for each in contenders)}"


def _engine_name(result: CandidateResult) -> str:
    return candidate_of(result).name
