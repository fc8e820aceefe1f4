"""Where contenders sit: builds artefacts, loads engines when a measurement needs them, and remembers every result.

Measurements that are in the store are not taken again, and then nothing is loaded. At most the contenders of one cycle
are in memory. Called by the loop and by baseline.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tokenmill.bench.prompts import SyntheticRequest
from tokenmill.config import EngineConfig
from tokenmill.evaluate.divergence import DivergenceReport
from tokenmill.optimize.artefacts import Workshop
from tokenmill.optimize.candidates import Candidate, parse_weights
from tokenmill.optimize.measure import Contender, QualityText, take_turns
from tokenmill.optimize.results import Artefact, CandidateResult, Run
from tokenmill.optimize.store import Store
from tokenmill.optimize.traffic import Traffic

_FIRST_PAIRS = 2
_CLEAR = 1.5  # a ratio that one run is enough for
_FINAL_LENGTH = 2  # requests per slot in the final, one in the first round: runs grow


class BenchTable:
    default_kv = "float32"

    def __init__(self, store: Store, traffic: Traffic, engine: EngineConfig, workshop: Workshop) -> None:
        self.store = store
        self.traffic = traffic
        self.engine = engine
        self.workshop = workshop
        self._loaded: dict[str, Contender] = {}
        self._references: dict[int, str] = {}

    def artefact(self, weights: str, seconds_left: float) -> Artefact:
        choice = parse_weights(weights)
        return self.workshop.find(choice) or self.workshop.make(choice, seconds_left, lambda *_: None)

    def config(self, result: CandidateResult) -> EngineConfig:
        return replace(
            self.engine, kv_cache_dtype=result.kv, batch_tokens=result.batch_tokens, speculate=result.speculate
        )

    def path(self, result: CandidateResult) -> Path:
        return self.workshop.path(parse_weights(result.weights))

    def pair(self, kind: str, baseline: CandidateResult, result: CandidateResult) -> tuple[list[Run], list[Run]]:
        """Short runs: baseline, candidate, and once more of each where one run cannot tell them apart."""
        found = self.store.recall(kind, result.name)
        if found is None:
            contenders = self._seat([baseline, result])
            found = []
            while len(found) < _FIRST_PAIRS:
                base, own = take_turns(contenders, self._requests(1, len(found)))
                found.append([asdict(base), asdict(own)])
                if not 1 / _CLEAR < base.total_tok_s / own.total_tok_s < _CLEAR:
                    break
            self.store.remember(kind, result.name, found)
        return [Run(**cycle[0]) for cycle in found], [Run(**cycle[1]) for cycle in found]

    def cycle(self, contenders: Sequence[CandidateResult], number: int) -> list[Run]:
        """A long run of each in turn."""
        key = self._cycle_key(contenders, number)
        found = self.store.recall("final", key)
        if found is None:
            # Every other cycle in reverse: whoever comes first gains nothing by it.
            seats = self._seat(contenders)
            turn = -1 if number % 2 else 1
            runs = take_turns(seats[::turn], self._requests(_FINAL_LENGTH, 1000 + number))[::turn]
            found = [asdict(run) for run in runs]
            self.store.remember("final", key, found)
        return [Run(**run) for run in found]

    def has_cycle(self, contenders: Sequence[CandidateResult], number: int) -> bool:
        return self.store.recall("final", self._cycle_key(contenders, number)) is not None

    def compare_text(self, text: QualityText, baseline: CandidateResult, result: CandidateResult) -> DivergenceReport:
        """The candidate's predictions against the baseline's, each with its own KV dtype."""
        self._clear(_seat_name(result))  # scoring loads an engine of its own
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

    def _seat(self, results: Sequence[CandidateResult]) -> list[Contender]:
        """Load who is missing, unload who is not wanted."""
        wanted = {_seat_name(result): result for result in results}
        for name in [name for name in self._loaded if name not in wanted]:
            self._clear(name)
        for name, result in wanted.items():
            if name not in self._loaded:
                self._loaded[name] = Contender(self.path(result), self.config(result))
        return [self._loaded[name] for name in wanted]

    def _clear(self, name: str) -> None:
        if name in self._loaded:
            self._loaded.pop(name).close()

    def _requests(self, per_slot: int, run: int) -> list[SyntheticRequest]:
        return self.traffic.draw(per_slot * self.engine.decided("concurrency"), run)

    @staticmethod
    def _cycle_key(contenders: Sequence[CandidateResult], number: int) -> str:
        return f"{number}:{','.join(_seat_name(each) for each in contenders)}"


def _seat_name(result: CandidateResult) -> str:
    return Candidate(result.weights, result.kv, result.batch_tokens, result.speculate).name
