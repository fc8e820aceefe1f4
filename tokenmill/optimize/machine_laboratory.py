"""The laboratory of this machine: measures candidates with engines in child processes, and stores every result.

A measurement that is in the store is not repeated, and nothing is built or loaded for it. One child computes at a time.
Children stay alive between candidates, with their engines where the contenders of a cycle fit into memory together. A
candidate that crashes, hangs or fills the memory raises ContenderError; its child is replaced. Called by the loop.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tokenmill import __version__
from tokenmill.bench.prompts import SyntheticRequest
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.hardware.machine import detect_machine
from tokenmill.optimize.arrivals import Arrivals
from tokenmill.optimize.artefacts import TRAINED_HEADS, ArtefactCache, NotEnoughTimeError, weight_bytes
from tokenmill.optimize.candidates import WeightChoice, parse_weights
from tokenmill.optimize.contender import ContenderError, NoAnswerError
from tokenmill.optimize.contender_messages import Built, Command, Judge, RunRequests
from tokenmill.optimize.contender_pool import LOAD_FACTOR, ContenderPool, Place, ResourceLimits
from tokenmill.optimize.local_server import LocalServer
from tokenmill.optimize.objectives import Objectives
from tokenmill.optimize.quality import QualityPlan
from tokenmill.optimize.rate_search import likely_scale, sustain
from tokenmill.optimize.records import from_plain, to_plain
from tokenmill.optimize.replay import replay
from tokenmill.optimize.results import Artefact, CandidateResult, Latency, Proof, Quality, Run, Sustained
from tokenmill.optimize.store import Store
from tokenmill.optimize.traffic import Traffic

T = TypeVar("T")
_FIRST_PAIRS = 2
_CLEAR = 1.5  # beyond this ratio one run is enough
_FINAL_LENGTH = 2  # requests per slot in the final; the first round has one
_SLOWEST = 10.0  # a candidate that needs this many times the baseline's seconds has lost
_SHORTEST_RUN = 20.0  # seconds that every run may take
_GOODPUT = "tokens in time"  # how it is counted: replays that counted otherwise are not taken up again
_BUILD_GRACE = 30.0  # seconds beyond the forecast
_LOG = "contenders.log"
_DIALECT = "tokenmill"


class MachineLaboratory:
    def __init__(
        self,
        store: Store,
        traffic: Traffic,
        engine: EngineConfig,
        artefacts: ArtefactCache,
        quality: QualityPlan,
        limits: ResourceLimits | None = None,
        arrivals: Arrivals | None = None,
        objectives: Objectives | None = None,
        served_concurrency: int = 0,
    ) -> None:
        """`served_concurrency`: of the servers that are replayed against, 0: as in `engine`."""
        self.store = store
        self.traffic = traffic
        self.device = engine.device or "cpu"
        self.engine = replace(engine, device=self.device)
        self.artefacts = artefacts
        self.quality = quality
        self.arrivals = arrivals
        self.objectives = objectives
        self._served_concurrency = served_concurrency or engine.concurrency
        self._pool = ContenderPool(store.folder / _LOG, self.device, limits or ResourceLimits())
        self._server: LocalServer | None = None
        self._served = ""  # the engine name of its candidate
        self._scale_and_cost: tuple[float, float] | None = None  # of the candidate whose rate was searched last
        machine = detect_machine()
        where = machine.gpus[0] if self.device == "cuda" and machine.gpus else machine.cpu
        self._origin = f"{__version__} on {self.device} {where}, {machine.cores} cores"

    @property
    def limits(self) -> ResourceLimits:
        return self._pool.limits

    @limits.setter
    def limits(self, limits: ResourceLimits) -> None:
        self._pool.limits = limits

    # --- artefacts ---

    def build(self, result: CandidateResult, seconds: float) -> Artefact:
        choice = parse_weights(result.weights)
        artefact = self.artefacts.find(choice)
        if artefact is None:
            artefact = self.artefacts.record(choice, self._make(self.artefacts.order(choice, seconds), seconds))
        if result.speculate in TRAINED_HEADS:
            if not self.artefacts.drafter_path(choice, result.speculate).is_dir():
                self._train(choice, result, seconds)
            artefact = self.artefacts.with_drafter(artefact, choice, result.speculate)
        return artefact

    def _train(self, choice: WeightChoice, result: CandidateResult, seconds: float) -> None:
        config = replace(self.engine, kv_cache_dtype=result.kv)
        order = self.artefacts.drafter_order(choice, result.speculate, config, seconds)
        self.artefacts.times.learn(result.speculate, self._make(order, seconds))

    def _make(self, order: Command, seconds: float) -> Built:
        """Raises NotEnoughTimeError where it is forecast to take, or takes, longer than `seconds`."""
        self._stop_server()
        limit = min(self.limits.build_seconds, max(0.0, seconds) + _BUILD_GRACE)
        try:
            return self._pool.ask(self._pool.idle(), order, Built, limit, "building")
        except NoAnswerError as error:
            raise NotEnoughTimeError(
                f"it was not built in {limit:.0f} s", "give more --minutes: finished blocks are kept"
            ) from error

    # --- speed ---

    def pair(self, kind: str, baseline: CandidateResult, result: CandidateResult) -> tuple[list[Run], list[Run]]:
        key = f"{engine_name(result)} against {engine_name(baseline)}"
        cycles = self._recall(kind, key)
        if cycles is None:
            cycles = []
            while len(cycles) < _FIRST_PAIRS:
                base, candidate = self._turns([baseline, result], self._requests(1, len(cycles)), len(cycles))
                cycles.append([to_plain(base), to_plain(candidate)])
                if not 1 / _CLEAR < base.total_tok_s / candidate.total_tok_s < _CLEAR:
                    break
            self._remember(kind, key, cycles)
        return [Run(**cycle[0]) for cycle in cycles], [Run(**cycle[1]) for cycle in cycles]

    def cycle(self, contenders: Sequence[CandidateResult], number: int) -> list[Run]:
        records = self._recall("final", _cycle_key(contenders, number))
        if records is None:
            runs = self._turns(contenders, self._requests(_FINAL_LENGTH, 1000 + number), number)
            records = [to_plain(run) for run in runs]
            self._remember("final", _cycle_key(contenders, number), records)
        return [Run(**run) for run in records]

    def has_cycle(self, contenders: Sequence[CandidateResult], number: int) -> bool:
        return self._recall("final", _cycle_key(contenders, number)) is not None

    def _turns(self, contenders: Sequence[CandidateResult], requests: list[SyntheticRequest], number: int) -> list[Run]:
        """Each contender runs the same requests; the first one is the baseline, whose time bounds the others'. Every
        other turn runs in reverse, so that the position favours nobody."""
        runs: dict[int, Run] = {}
        order = list(range(len(contenders)))[:: -1 if number % 2 else 1]
        for place in order:
            if not self._pool.is_crowded:  # all are loaded and warm before any is timed
                self._attempt(contenders[place], contenders, requests, None, is_baseline=place == 0)
        for place in order:
            seconds = self.limits.run_seconds
            if 0 in runs:
                seconds = min(seconds, max(_SHORTEST_RUN, _SLOWEST * runs[0].elapsed_s))
            found = self._attempt(contenders[place], contenders, requests, seconds, is_baseline=place == 0)
            assert found is not None
            runs[place] = found
        return [runs[place] for place in range(len(contenders))]

    def _attempt(
        self,
        result: CandidateResult,
        together: Sequence[CandidateResult],
        requests: list[SyntheticRequest],
        seconds: float | None,
        is_baseline: bool,
    ) -> Run | None:
        """Load and warm up, and run within `seconds`; None: do not run yet. What ends the baseline may be what a
        candidate did to the machine: it has a second attempt."""
        for is_last in (not is_baseline, True):
            try:
                place = self._engine(result, together)
                is_cold = not place.is_warm
                self._pool.warm_up(place, requests[0])
                if is_cold and self.device == "cuda":  # kernels are compiled for the shapes that come up
                    self._pool.ask(place, RunRequests(requests), Run, self.limits.run_seconds, "warming up")
                if seconds is None:
                    return None
                return self._pool.ask(place, RunRequests(requests), Run, seconds, "running requests")
            except ContenderError as error:
                error.candidate = result.name
                if is_last or isinstance(error, NoAnswerError):
                    raise
        raise AssertionError("not reached")

    # --- quality ---

    def check(self, baseline: CandidateResult, result: CandidateResult) -> Quality:
        return self._judged("short", baseline, result, Quality)

    def prove(self, baseline: CandidateResult, result: CandidateResult) -> Proof:
        return self._judged("quality", baseline, result, Proof)

    def _judged(self, kind: str, baseline: CandidateResult, result: CandidateResult, answer: type[T]) -> T:
        key = self._quality_key(kind, baseline, result)
        record = self._recall(kind, key)
        if record is None:
            self._stop_server()
            self._pool.release(engine_name(result))  # the judge loads an engine of its own
            command = Judge(
                self.quality,
                self._path(baseline),
                self._judged_config(baseline),
                self._path(result),
                self._judged_config(result),
                kind == "quality",
            )
            place = self._pool.idle(int(weight_bytes(command.path) * LOAD_FACTOR), judging=True)
            seconds = self.limits.quality_seconds
            record = to_plain(self._pool.ask(place, command, answer, seconds, "measuring quality"))
            self._remember(kind, key, record)
        return from_plain(answer, record)

    def _judged_config(self, result: CandidateResult) -> EngineConfig:
        """Guesses change no prediction, and a prefix found in a cache was predicted before."""
        return replace(self.config(result), prefix_caching=False, speculate="off", concurrency=None)

    def _quality_key(self, kind: str, baseline: CandidateResult, result: CandidateResult) -> str:
        plan = self.quality
        if kind == "short":
            decisive: list[Any] = [plan.text, plan.context, plan.short_windows]
        else:
            contents = [hashlib.sha256(path.read_bytes()).hexdigest() for path in plan.tasks]
            decisive = [to_plain(replace(plan, tasks=())), contents]
        without_drafter = replace(result, speculate="off")
        return f"{engine_name(without_drafter)} against {engine_name(baseline)} by {_digest(decisive)}"

    # --- latency ---

    def replay(self, result: CandidateResult) -> Latency:
        key = self._arrivals_key(result)
        if self.arrivals is not None and not self.arrivals.has_rate:
            return self.sustain(result).latency
        record = self._recall("latency", key)
        if record is None:
            assert self.arrivals is not None
            assert self.objectives is not None
            server = self._serve(result)
            latency = replay(
                server.url,
                self.arrivals,
                self.objectives,
                model=server.model,
                time_limit_s=self.limits.replay_seconds,
                dialect=_DIALECT,
            )
            record = to_plain(latency)
            self._remember("latency", key, record)
        return from_plain(Latency, record)

    def sustain(self, result: CandidateResult) -> Sustained:
        key = self._arrivals_key(result)
        record = self._recall("sustained", key)
        if record is None:
            assert self.arrivals is not None
            assert self.objectives is not None
            server = self._serve(result)
            found = sustain(
                server.url,
                self.arrivals,
                self.objectives,
                seconds=self.limits.rate_search_seconds,
                model=server.model,
                start=self._first_scale(result),
                answer_s=result.latency.e2e_ms.p50 / 1000 if result.latency else 0.0,
            )
            if result.speed and found.latency.objective_met:
                scale = found.latency.offered_requests_s / self.arrivals.requests_s
                self._scale_and_cost = scale, result.speed.cost_ratio
            record = to_plain(found)
            self._remember("sustained", key, record)
        return from_plain(Sustained, record)

    def _first_scale(self, result: CandidateResult) -> float:
        """Where to search first: from what another sustained, by how much they cost; else from the throughput."""
        assert self.arrivals is not None
        if result.speed is None:
            return 1.0
        if self._scale_and_cost is None:
            return likely_scale(result.speed.output_tok_s, self.arrivals)
        scale, cost = self._scale_and_cost
        return scale * cost / result.speed.cost_ratio

    def _arrivals_key(self, result: CandidateResult) -> str:
        if self.arrivals is None or self.objectives is None:
            raise UserError("there are no arrivals to replay", "give --trace, --prompts or --traffic-log")
        decisive = [to_plain(self.arrivals), to_plain(self.objectives), self._served_concurrency, _GOODPUT]
        return f"{engine_name(result)} by {_digest(decisive)}"

    def _serve(self, result: CandidateResult) -> LocalServer:
        """A server of the candidate, which stays until something else is measured."""
        name = engine_name(result)
        if self._served == name and self._server is not None and self._server.alive():
            return self._server
        path, config = self._path(result), replace(self.config(result), concurrency=self._served_concurrency)
        self._stop_server()
        self._pool.release_all()
        log = self.store.folder / "servers.log"
        server = LocalServer(path, config, log=log, ready_seconds=self.limits.load_seconds)
        server.__enter__()
        self._server, self._served = server, name
        return server

    def _stop_server(self) -> None:
        server, self._server, self._served = self._server, None, ""
        if server is not None:
            server.__exit__(None, None, None)

    def config(self, result: CandidateResult) -> EngineConfig:
        speculate = result.speculate
        if speculate in TRAINED_HEADS:
            speculate = f"{speculate}:{self.artefacts.drafter_path(parse_weights(result.weights), speculate)}"
        own = {"kv_cache_dtype": result.kv, "batch_tokens": result.batch_tokens, "speculate": speculate}
        values = {**own, **result.options}
        stated = dict.fromkeys(("context", *values), "the candidate")  # a server is started with these, too
        return replace(self.engine, **values, sources={**self.engine.sources, **stated})

    def close(self) -> None:
        self._stop_server()
        self._pool.close()

    # --- children ---

    def _path(self, result: CandidateResult) -> Path:
        """What a measurement needs is made, however long it takes."""
        return Path(self.build(result, float("inf")).path)

    def _engine(self, result: CandidateResult, together: Sequence[CandidateResult]) -> Place:
        self._stop_server()
        names = {engine_name(each) for each in together}
        artefact = self.build(result, float("inf"))
        return self._pool.engine(engine_name(result), names, Path(artefact.path), artefact.nbytes, self.config(result))

    # --- the store ---

    def _recall(self, kind: str, key: str) -> Any:
        return self.store.recall(kind, f"{key} ({self._origin})")

    def _remember(self, kind: str, key: str, value: Any) -> None:
        self.store.remember(kind, f"{key} ({self._origin})", value)

    def _requests(self, per_slot: int, run: int) -> list[SyntheticRequest]:
        return self.traffic.draw(per_slot * self.engine.decided("concurrency"), run)


def engine_name(result: CandidateResult) -> str:
    """All that an engine is loaded with."""
    words = [result.weights, result.kv, str(result.batch_tokens), result.speculate]
    return "/".join([*words, *(f"{key}={value}" for key, value in sorted(result.options.items()))])


def _cycle_key(contenders: Sequence[CandidateResult], number: int) -> str:
    return f"{number}:{','.join(engine_name(each) for each in contenders)}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
