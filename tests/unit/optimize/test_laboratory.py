"""Measuring with real engines in child processes: what goes wrong in one is recorded, and everything else goes on."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenmill import __version__
from tokenmill.bench.prompts import random_requests
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config import EngineConfig
from tokenmill.model.kvstore import KV_STORES
from tokenmill.optimize import artefacts, contender_pool, machine_laboratory
from tokenmill.optimize.arrivals import Arrivals
from tokenmill.optimize.artefacts import ArtefactCache, BuildTimes, NotEnoughTimeError
from tokenmill.optimize.candidates import parse_weights
from tokenmill.optimize.contender import ContenderError
from tokenmill.optimize.contender_messages import Built
from tokenmill.optimize.contender_pool import ResourceLimits
from tokenmill.optimize.machine_laboratory import MachineLaboratory
from tokenmill.optimize.objectives import Objectives
from tokenmill.optimize.quality import QualityPlan
from tokenmill.optimize.results import CandidateResult, Latency, Percentiles, Sustained
from tokenmill.optimize.store import Store
from tokenmill.optimize.traffic import Traffic

_HERE = "tests.unit.optimize.faulty_stores"
_FAULTY = ("Crashing", "Hanging", "Hungry", "Refusing")
_LIMITS = ResourceLimits(600.0, 600.0, 600.0, 600.0)
_TEXT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. " * 40

BASELINE = CandidateResult("baseline", "stored", "float32", 256)
HALF = CandidateResult("half", "stored", "float16", 256)


@pytest.fixture(scope="module")
def model(model_path: Callable[[str], Path]) -> Path:
    return model_path("stories15m")


@pytest.fixture(scope="module", autouse=True)
def faulty_stores() -> Iterator[None]:
    for name in _FAULTY:
        KV_STORES.register(name.lower(), f"{_HERE}:{name}Store")
    yield
    for name in _FAULTY:
        KV_STORES.unregister(name.lower())


@pytest.fixture(scope="module")
def make_lab(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., MachineLaboratory]]:
    """A laboratory on an output folder; what it makes goes to a cache of its own."""
    checkpoint = open_checkpoint(model)
    made: list[MachineLaboratory] = []

    def make(folder: Path, **changes: Any) -> MachineLaboratory:
        vocabulary = checkpoint.description.vocab_size
        traffic = Traffic(lambda count, run: random_requests(vocabulary, count, 16, 4, seed=run), 20, 16, 4, "short")
        engine = EngineConfig(context=20, concurrency=2, batch_tokens=256, threads=2, device="cpu")
        plan = QualityPlan(_TEXT, 64, 1, 2, 0.5, 0.5, generation=False)
        cache = ArtefactCache(model, checkpoint, "stories15m", 1)
        lab = MachineLaboratory(Store(folder, "k"), traffic, engine, cache, plan, _LIMITS, **changes)
        made.append(lab)
        return lab

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENMILL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield make
        for lab in made:
            lab.close()


@pytest.fixture(scope="module")
def lab(make_lab: Callable[..., MachineLaboratory], tmp_path_factory: pytest.TempPathFactory) -> MachineLaboratory:
    return make_lab(tmp_path_factory.mktemp("out"))


def _faulty(kv: str) -> CandidateResult:
    return CandidateResult(f"stored/{kv}", "stored", kv, 256)


def _pids(lab: MachineLaboratory) -> dict[str, int]:
    return {place.name: place.contender.pid for place in lab._pool._places}


@pytest.mark.parametrize(
    ("kv", "limits", "reason"),
    [
        ("crashing", _LIMITS, "killed by signal 11"),
        ("hanging", replace(_LIMITS, load_seconds=1.0), r"no answer in 1 s while loading"),
        ("hungry", replace(_LIMITS, memory_bytes=1 << 30), r"took 1\.\d GiB of 1\.0 GiB"),
        ("refusing", _LIMITS, "RuntimeError: no pages of this kind"),
    ],
)
def test_a_candidate_that_fails_is_named_and_the_others_go_on(
    lab: MachineLaboratory, kv: str, limits: ResourceLimits, reason: str
) -> None:
    lab.pair(f"before {kv}", BASELINE, HALF)
    before = _pids(lab)
    name = machine_laboratory.engine_name
    lab.limits = limits
    try:
        with pytest.raises(ContenderError, match=reason) as failure:
            lab.pair("first", BASELINE, _faulty(kv))
    finally:
        lab.limits = _LIMITS
    assert failure.value.candidate == f"stored/{kv}"
    assert "\n" not in str(failure.value)
    after = _pids(lab)
    assert after[name(BASELINE)] == before[name(BASELINE)], "the baseline's child lives on"
    with pytest.raises(ProcessLookupError):
        os.kill(before[name(HALF)], 0)  # the child that served the candidates before is gone, and waited for
    base, runs = lab.pair(f"after {kv}", BASELINE, HALF)
    assert base[0].total_tok_s > 0
    assert runs[0].total_tok_s > 0
    assert _pids(lab)[name(BASELINE)] == before[name(BASELINE)]


def test_a_baseline_whose_child_was_killed_is_started_again(lab: MachineLaboratory) -> None:
    lab.cycle([BASELINE, HALF], 0)
    before = _pids(lab)[machine_laboratory.engine_name(BASELINE)]
    os.kill(before, signal.SIGKILL)
    assert len(lab.cycle([BASELINE, HALF], 1)) == 2
    assert _pids(lab)[machine_laboratory.engine_name(BASELINE)] != before


def test_a_child_that_is_not_asked_uses_no_processor_time(lab: MachineLaboratory) -> None:
    lab.cycle([BASELINE, HALF], 10)
    idle = _pids(lab)[machine_laboratory.engine_name(HALF)]
    before = _processor_ticks(idle)
    place = next(each for each in lab._pool._places if each.name == machine_laboratory.engine_name(BASELINE))
    for number in range(5):
        lab._attempt(BASELINE, [BASELINE, HALF], lab._requests(4, number), 600.0, is_baseline=True)
    assert place.contender.is_running()
    assert _processor_ticks(idle) - before <= 1  # a hundredth of a second: the end of the wait before


def _processor_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_second_run_recalls_everything_without_an_engine(
    make_lab: Callable[..., MachineLaboratory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_lab(tmp_path)
    expected = _everything(first)
    assert expected[2].kld_mean < 0.01
    assert expected[3].refusals == ()
    first.close()
    monkeypatch.setattr(contender_pool, "Contender", None)  # starting a child would fail
    again = make_lab(tmp_path)
    assert again.has_cycle([BASELINE, HALF], 0)
    assert _everything(again) == expected
    monkeypatch.setattr(machine_laboratory, "__version__", "another")
    with pytest.raises(TypeError):
        make_lab(tmp_path).check(BASELINE, HALF)  # measured by another version: a child would be started
    monkeypatch.setattr(machine_laboratory, "__version__", __version__)
    stricter = make_lab(tmp_path)
    stricter.quality = replace(stricter.quality, limit=0.001)
    assert stricter.check(BASELINE, HALF) == expected[2]
    with pytest.raises(TypeError):
        stricter.prove(BASELINE, HALF)  # refusals depend on the limit


def _everything(lab: MachineLaboratory) -> list[Any]:
    return [
        lab.pair("first", BASELINE, HALF),
        lab.cycle([BASELINE, HALF], 0),
        lab.check(BASELINE, HALF),
        lab.prove(BASELINE, HALF),
    ]


def test_children_end_with_their_parent(model: Path) -> None:
    program = f"""
from pathlib import Path
from tokenmill.config import EngineConfig
from tokenmill.model.kvstore import KV_STORES
from tokenmill.optimize.contender import Contender
from tokenmill.optimize.contender_messages import Load, Loaded
KV_STORES.register("hanging", "{_HERE}:HangingStore")
idle, busy = Contender(), Contender()
idle.wait_ready(), busy.wait_ready()
print(idle.pid, busy.pid, flush=True)
config = EngineConfig(kv_cache_dtype="hanging", context=20, device="cpu")
busy.ask(Load(Path({str(model)!r}), config), Loaded, 600.0, "loading")
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(children) == 2
    parent.kill()
    parent.wait()
    for child in children:
        ended, _, _ = select.select([child], [], [], 60.0)
        assert ended, "a child outlives its parent"
        os.close(child)


def test_what_is_forecast_to_take_longer_is_not_begun(lab: MachineLaboratory) -> None:
    choice = parse_weights("gptq-4")
    with pytest.raises(NotEnoughTimeError, match=r"would take about \d+ s and 0 s are left"):
        lab.build(CandidateResult("gptq-4", "gptq-4", "float32", 256), 0.0)
    assert not lab.artefacts.path(choice).exists()


def test_artefacts_are_made_once_and_serve(lab: MachineLaboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    file, folder = (CandidateResult(name, name, "float32", 256) for name in ("Q8_0", "mxfp4"))
    made = [lab.build(each, 600.0) for each in (file, folder)]
    assert made[0].path.endswith(".gguf")
    assert (Path(made[1].path) / "config.json").is_file()
    assert lab.artefacts.times.expected("mix") > 0
    base, runs = lab.pair("first", file, folder)
    assert len(base) == len(runs)
    monkeypatch.setattr(contender_pool, "Contender", None)
    lab.close()
    assert [lab.build(each, 0.0) for each in (file, folder)] == made


def test_a_drafter_is_trained_for_its_weights(lab: MachineLaboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artefacts, "TRAINING_TOKENS", 600)
    monkeypatch.setattr(artefacts, "TRAINING_STEPS", 2)
    drafted = CandidateResult("head", "stored", "float32", 256, "head")
    with pytest.raises(NotEnoughTimeError, match="training a drafter"):
        lab.build(drafted, 0.0)
    artefact = lab.build(drafted, 600.0)
    assert artefact.nbytes > lab.build(BASELINE, 0.0).nbytes
    assert "train-draft" in artefact.command
    _, runs = lab.pair("drafted", BASELINE, drafted)
    assert runs[0].total_tok_s > 0


def test_forecasts_learn_from_earlier_builds() -> None:
    times = BuildTimes()
    assert (times.slowdown("gptq"), times.expected("mix")) == (1.0, 0.0)
    times.learn("gptq", Built(30.0, 10.0))
    times.learn("mix", Built(4.0, 0.0))
    times.learn("mxfp4", Built(10.0, 0.01))  # less than it takes to read and write: not a factor of a thousand
    assert times.slowdown("gptq") == 3.0
    assert times.slowdown("mxfp4") == 2.0
    assert times.slowdown("awq") == 2.5, "of another kind: by all there are"
    assert times.expected("mix") == 4.0


def test_a_replay_and_a_rate_search_share_a_server_and_are_stored(
    make_lab: Callable[..., MachineLaboratory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server and the client are other modules' (tests/unit/optimize/test_replay.py)."""
    started: list[tuple[Path, EngineConfig]] = []
    flat = Percentiles(1.0, 1.0, 1.0, 1.0, 1.0)
    objectives = Objectives.parse(["p95=1s"], [])
    arrivals = Arrivals.poisson([[1], [2]], [1, 1], 1.0)

    class Server:
        url, model = "http://here", "name"

        def __init__(self, path: Path, config: EngineConfig, *, log: Path, ready_seconds: float) -> None:
            assert ready_seconds == _LIMITS.load_seconds
            assert log.parent == tmp_path
            started.append((path, config))
            self.running = False

        def __enter__(self) -> Server:
            self.running = True
            return self

        def __exit__(self, *_error: object) -> None:
            self.running = False

        def alive(self) -> bool:
            return self.running

    def replay(url: str, sent: Arrivals, kept: Objectives, *, model: str, time_limit_s: float, dialect: str) -> Latency:
        assert (url, model, kept, time_limit_s) == ("http://here", "name", objectives, _LIMITS.replay_seconds)
        assert dialect == "tokenmill"
        return Latency(len(sent), 0, 1.0, 1.0, flat, flat, flat, 1.0, 1.0, 1.0, True)

    def sustain(
        url: str, sent: Arrivals, kept: Objectives, *, seconds: float, model: str, start: float, answer_s: float
    ) -> Sustained:
        assert (start, answer_s) == (1.0, 0.0)
        assert (url, kept, seconds) == ("http://here", objectives, _LIMITS.rate_search_seconds)
        return Sustained(replay(url, sent, kept, model=model, time_limit_s=600.0, dialect="tokenmill"), 1.0, 2.0)

    for name, stand_in in (("LocalServer", Server), ("replay", replay), ("sustain", sustain)):
        monkeypatch.setattr(machine_laboratory, name, stand_in)
    lab = make_lab(tmp_path, arrivals=arrivals, objectives=objectives)
    candidate = replace(HALF, options={"prefix_caching": False})
    found, rate = lab.replay(candidate), lab.sustain(candidate)
    assert found.requests == 2
    assert (rate.low, rate.high) == (1.0, 2.0)
    path, config = started[0]
    assert path == Path(lab.artefacts.source)
    assert (config.kv_cache_dtype, config.prefix_caching) == ("float16", False)
    assert all(config.is_set(name) for name in ("context", "batch_tokens", "kv_cache_dtype", "concurrency"))
    again = make_lab(tmp_path, arrivals=arrivals, objectives=objectives)
    assert (again.replay(candidate), again.sustain(candidate)) == (found, rate)
    assert len(started) == 1, "one server for both, then recalled"
    free = make_lab(tmp_path, arrivals=replace(arrivals, has_rate=False), objectives=objectives)
    monkeypatch.setattr(machine_laboratory, "replay", None)
    assert free.replay(candidate) == free.sustain(candidate).latency, "without a rate: at the one that it sustains"
