"""The digital twin: a log made by a known machine is replayed within its noise, and changes do what they should."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tokenmill.cli.main import main
from tokenmill.engine.step_log import SERVER_FILE, STEPS_FILE
from tokenmill.errors import UserError
from tokenmill.plan.cost.measured_cost import MeasuredCost
from tokenmill.plan.simulate.changes import as_logged, changed
from tokenmill.plan.simulate.job import FleetOptions, SimulatedEngine, run_cluster
from tokenmill.plan.simulate.logged_server import LoggedServer, read_server
from tokenmill.plan.simulate.twin import TwinQuestion, ask_twin, make_twin
from tokenmill.plan.simulate.workload import Arrival, Workload

TRUTH = MeasuredCost((4.0, 1.0, 0.6, 0.4, 0.3, 0.5, 0.8, 20.0))
OUTSIDE_MS = 7.0
CONFIG = {
    "context": 1024, "concurrency": 16, "batch_tokens": 256, "page_size": 16, "memory": 1 << 30,
    "kv_cache_dtype": "bfloat16", "prefix_caching": True, "scheduling": "fcfs", "kv_policy": "lru", "device": "cpu",
}  # fmt: skip
SERVER = LoggedServer("/models/m", "m", "Testing 1000", "2026-01-02T03:04:05", CONFIG, (("full", 0, (0, 1)),), 300)


class Recording:
    """The true cost, with noise; keeps every step."""

    def __init__(self, noise: float, seed: int = 0) -> None:
        self.random = Random(seed)
        self.noise = noise
        self.rows: list[list[float]] = []

    def step_ms(self, prefill: Any, decode: tuple[int, float]) -> float:
        count, context = decode
        ms = TRUTH.step_ms(prefill, decode) * self.random.uniform(1 - self.noise, 1 + self.noise)
        if ms:
            chunks = [number for chunk in prefill for number in chunk]
            self.rows.append([1e9, ms, count, int(context), *chunks])
        return ms


def arrivals(count: int, rate: float, seed: int = 1) -> list[Arrival]:
    random, found, ms = Random(seed), [], 0.0
    for number in range(count):
        ms += 1e3 * random.expovariate(rate)
        blocks = tuple(range(4)) if random.random() < 0.3 else ()
        found.append(Arrival(number, ms, random.randint(70, 200), random.randint(5, 40), blocks, 16))
    return found


def write_log(folder: Path, rate: float = 3.0, count: int = 300, noise: float = 0.1, seed: int = 1) -> Path:
    """What a server with the true cost would have logged."""
    folder.mkdir(parents=True)
    cost = Recording(noise, seed)
    what = as_logged(SERVER, cost)
    sent = arrivals(count, rate, seed)
    engine = SimulatedEngine(what.shape, cost, 0.0)
    fleet = FleetOptions(prefix_caching=True, strides=False)
    records = run_cluster(engine, Workload("log", lambda: iter(sent)), fleet).records.finished
    facts = {"version": 1, "model": SERVER.model, "name": "m", "device": SERVER.device, "started": SERVER.started,
             "config": CONFIG, "groups": SERVER.groups, "num_pages": SERVER.num_pages}  # fmt: skip
    (folder / SERVER_FILE).write_text(json.dumps(facts))
    (folder / STEPS_FILE).write_text("{}\n" + "".join(json.dumps(row) + "\n" for row in cost.rows) + "[1, 2")
    lines = [json.dumps({"tokenmill_traffic_log": 1})]
    for record in records:
        packed = b"".join(block.to_bytes(8, "big") for block in record.arrival.blocks)
        lines.append(
            json.dumps(
                {
                    "arrival_unix": 1e9 + record.sent / 1e3,
                    "prompt_tokens": record.arrival.prompt_tokens,
                    "output_tokens": record.tokens,
                    "cached_tokens": record.cached,
                    "ttft_ms": record.ttft_ms + OUTSIDE_MS,
                    "e2e_ms": record.e2e_ms + OUTSIDE_MS,
                    "prefix": base64.b64encode(packed).decode(),
                }
            )
        )
    (folder / "traffic-a.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("twin") / "log")


def test_yesterday_is_replayed_within_its_noise(log: Path) -> None:
    answer = ask_twin(TwinQuestion(log))
    assert answer["requests"] == 300
    assert abs(answer["error"]["throughput_tok_s"]) < 0.02
    assert abs(answer["error"]["ttft_ms_p50"]) < 0.1
    assert abs(answer["error"]["ttft_ms_p95"]) < 0.15
    assert answer["request_ms"] == pytest.approx(OUTSIDE_MS, abs=3.0)
    assert answer["simulated"]["cache_hit_rate"] == pytest.approx(answer["measured"]["cache_hit_rate"], abs=0.03)
    assert "2026-01-02" in answer["basis"]
    assert answer["cost"]["dollars"] is None
    assert "--price" in answer["cost"]["basis"]


def test_one_load_predicts_another(log: Path, tmp_path: Path) -> None:
    """Calibrated at one rate, tested nearer to saturation."""
    busier = write_log(tmp_path / "busier", rate=4.5, seed=2)
    twin = make_twin(busier, make_twin(log))
    assert twin.fitted_elsewhere
    assert abs(twin.errors["throughput_tok_s"]) < 0.05
    assert abs(twin.errors["ttft_ms_p50"]) < 0.15
    assert abs(twin.errors["ttft_ms_p95"]) < 0.25


def test_two_replicas_cost_more_and_wait_less(log: Path) -> None:
    answer = ask_twin(TwinQuestion(log, ("replicas=2",), price=3.0))
    after = answer["changed"]
    assert after["figures"]["tpot_ms"]["p50"] < answer["simulated"]["tpot_ms"]["p50"]
    assert after["cost"]["dollars_per_hour"] == pytest.approx(6.0)
    assert after["cost"]["dollars"] > 1.8 * answer["cost"]["dollars"]
    low, high = after["interval"]["ttft_ms_p50"]
    assert low <= after["figures"]["ttft_ms"]["p50"] <= high


def test_half_the_memory_preempts(log: Path) -> None:
    what = changed(SERVER, TRUTH, ["memory=half"])
    assert what.shape.num_pages == 150
    assert changed(SERVER, TRUTH, ["memory=512MiB"]).shape.num_pages == 150
    answer = ask_twin(TwinQuestion(log, ("memory=half",)))["changed"]
    assert answer["figures"]["throughput_tok_s"] > 0


def test_a_narrower_cache_holds_more_and_says_what_it_assumes() -> None:
    what = changed(SERVER, TRUTH, ["kv-cache-dtype=fp8", "concurrency=32", "prefix-caching=false"])
    assert (what.shape.num_pages, what.shape.max_running, what.prefix_caching) == (600, 32, False)
    assert "fp8" in what.assumptions[0]
    step = ([], (8, 4000.0))
    assert what.cost.step_ms(*step) < TRUTH.step_ms(*step)


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("replicas", "is not a change"),
        ("replicas=0", "replicas is"),
        ("router=random", "unknown router"),
        ("memroy=half", "did you mean 'memory'"),
        ("memory=0.01x", "do not hold one request"),
        ("threads=4", "not known without running it"),
        ("kv-cache-dtype=turboquant4", "not known here"),
        ("quantization=fp8", "is not known"),
        ("concurrency=many", "concurrency"),
    ],
)
def test_changes_that_cannot_be_simulated_are_refused(word: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        changed(SERVER, TRUTH, [word])


def test_other_weights_on_a_known_gpu_shorten_the_steps() -> None:
    server = replace(SERVER, device="NVIDIA H200", model="llama-3.1-8b")
    what = changed(server, TRUTH, ["quantization=fp8", "kv-cache-dtype=fp8"])
    step = ([], (4, 2000.0))
    assert 0.4 < what.cost.step_ms(*step) / TRUTH.step_ms(*step) < 0.95
    assert len(what.assumptions) == 2


def test_the_command_line_answers(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--traffic-log", str(log), "--with", "replicas=2", "--price", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["changed"]["with"] == ["replicas=2"]
    assert main(["simulate", "--traffic-log", str(log), "--with", "memory=half"]) == 0
    shown = capsys.readouterr().out
    assert "would have been" in shown
    assert "error bar" in shown
    assert main(["simulate", "m", "--traffic-log", str(log)]) == 2
    assert main(["simulate", "smollm2", "--gpu", "h100", "--with", "replicas=2"]) == 2


def test_logs_without_a_server_or_steps_are_refused(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="traffic-log"):
        read_server(tmp_path)
    (tmp_path / SERVER_FILE).write_text('{"version": 1}')
    with pytest.raises(UserError, match="lacks"):
        read_server(tmp_path)
    bare = replace(read_server(log), steps=())
    with pytest.raises(UserError, match="--calibrate"):
        bare.fit()
