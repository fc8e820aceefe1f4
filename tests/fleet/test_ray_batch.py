"""`run-batch --ray` on a real cluster: a worker killed in the middle, and every request answered once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fleet.conftest import kill, pids
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.offline import Counts

batch = pytest.importorskip("tokenmill.ray.batch", reason="ray is not installed: `make test-ray` runs these")
_CONFIG = ServeConfig(served_model_name=("m",), max_body_bytes=1 << 20, spare_engine=False, text_workers=1)
_WORKER = "MapBatches(Worker)"


def write(path: Path, number: int) -> list[str]:
    names = [f"row-{each}" for each in range(number)]
    with path.open("w", encoding="utf-8") as file:
        for each, name in enumerate(names):
            body = {"model": "m", "prompt": f"Once upon a time {each}", "max_tokens": 4, "temperature": 0}
            file.write(json.dumps({"custom_id": name, "url": "/v1/completions", "body": body}) + "\n")
    return names


def answers(path: Path) -> Counter[str]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert all(line["response"]["status_code"] == 200 for line in lines)
    return Counter(line["custom_id"] for line in lines)


def run_with_a_death(model: Path, folder: Path, number: int) -> None:
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    names = write(source, number)
    killed: list[int] = []

    def progress(counts: Counts) -> None:
        if not killed and counts.completed >= number // 10:
            killed.append(min(pids(_WORKER)))
            kill(killed[0])

    engine = EngineConfig(concurrency=16, threads=1)
    counts = batch.run_batch(str(model), source, target, _CONFIG, engine, progress, batch.Workers(count=2))
    assert killed
    assert (counts.total, counts.completed, counts.failed) == (number, number, 0)
    assert answers(target) == Counter(names)


@pytest.mark.usefixtures("cluster")
def test_a_killed_worker_costs_no_answer(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    run_with_a_death(model_path("stories15m"), tmp_path, 200)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_five_thousand_prompts_with_a_killed_worker(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    run_with_a_death(model_path("stories15m"), tmp_path, 5000)


@pytest.mark.usefixtures("cluster")
def test_what_is_answered_is_not_asked_again(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, 24)
    job = (str(model_path("stories15m")), source, target, _CONFIG, EngineConfig(threads=1), lambda _counts: None)
    batch.run_batch(*job, batch.Workers())
    whole = target.read_bytes()
    target.write_bytes(b"".join(whole.splitlines(keepends=True)[:10]) + b'{"id":"batch_req_torn')
    counts = batch.run_batch(*job, batch.Workers())
    assert counts.resumed == 10
    assert sum(answers(target).values()) == 24
    assert target.read_bytes().startswith(b"".join(whole.splitlines(keepends=True)[:10]))


@pytest.mark.usefixtures("cluster")
def test_a_model_that_is_not_there_ends_the_run(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", 8)
    job = (str(tmp_path / "nothing"), tmp_path / "in.jsonl", tmp_path / "out.jsonl", _CONFIG, EngineConfig())
    with pytest.raises(UserError, match="the workers cannot go on"):
        batch.run_batch(*job, lambda _counts: None, batch.Workers())


def test_the_command_starts_a_cluster_of_its_own(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", 16)
    flags = ["-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--model", model_path("stories15m")]
    flags += ["--served-model-name", "m", "--ray", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill", "run-batch", *map(str, flags)],
        env={**os.environ, "RAY_ADDRESS": "local"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completed"] == 16
    assert sum(answers(tmp_path / "out.jsonl").values()) == 16
