"""benchmarks/quantizers.py: what it starts on which device, how jobs end, and where peers find their packages."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

_BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def quantizers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(_BENCHMARKS))
    import quantizers

    return quantizers


class _Started:
    """In the place of `run`: keeps what would have been started."""

    def __init__(self) -> None:
        self.jobs: list[tuple[list[str], dict[str, str], int]] = []

    def __call__(self, command: list[str], variables: Mapping[str, str], _: Path, limit: int) -> Any:
        self.jobs.append((command, dict(variables), limit))
        return 3.0, 2.0, 1


def _harness(quantizers: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> tuple[Any, _Started]:
    started, model = _Started(), folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    monkeypatch.setattr(quantizers, "run", started)
    monkeypatch.setattr(quantizers.Harness, "_measure", lambda *_: None)
    fixed = ["--model", str(model), "--calibration", "c.txt", "--text", "t.txt", "--out", str(folder / "out")]
    return quantizers.Harness(quantizers.read_arguments([*fixed, *words])), started


def _after(command: list[str], word: str) -> str:
    return command[command.index(word) + 1]


def test_ours_and_peers_quantize_on_the_device(quantizers: Any, monkeypatch: Any, tmp_path: Path) -> None:
    words = ["--device", "cuda", "--peer-packages", str(tmp_path), "--limit", "90", "--samples", "64"]
    harness, started = _harness(quantizers, monkeypatch, tmp_path, *words)
    rows = [harness.row(who, 4) for who in ("ours:autoround+best", "auto-round")]
    assert [_after(command, "--device") for command, _, _ in started.jobs] == ["cuda", "cuda"]
    assert [limit for *_, limit in started.jobs] == [90, 90]
    assert [(row.device, row.seconds, row.skipped) for row in rows] == [("cuda", 3.0, "")] * 2
    assert "pool=192" in started.jobs[0][0], "the drawn sequences too"
    command, variables, _ = started.jobs[1]
    assert command[0] == sys.executable, "nothing is installed"
    assert "CUDA_VISIBLE_DEVICES" not in variables


def test_on_the_cpu_peers_see_no_gpu(quantizers: Any, monkeypatch: Any, tmp_path: Path) -> None:
    harness, started = _harness(quantizers, monkeypatch, tmp_path, "--peer-packages", str(tmp_path))
    harness.row("llm-compressor-gptq", 4)
    command, variables, _ = started.jobs[0]
    assert (_after(command, "--device"), variables["CUDA_VISIBLE_DEVICES"]) == ("cpu", "")


def test_own_packages_of_a_peer_come_first(quantizers: Any, monkeypatch: Any, tmp_path: Path) -> None:
    (tmp_path / "llm-compressor").mkdir()
    monkeypatch.setenv("PYTHONPATH", "/ours")
    common = str(tmp_path.resolve())
    own = str(tmp_path.resolve() / "llm-compressor")
    assert quantizers.peer_path("llm-compressor-awq", tmp_path).split(os.pathsep) == [own, common, "/ours"]
    assert quantizers.peer_path("auto-round", tmp_path).split(os.pathsep) == [common, "/ours"]


def test_files_without_their_cost_are_made_again(quantizers: Any, monkeypatch: Any, tmp_path: Path) -> None:
    harness, started = _harness(quantizers, monkeypatch, tmp_path)
    (tmp_path / "out" / "ours-rtn-4-sym").mkdir()  # what a killed job left
    harness.row("ours:rtn", 4)
    harness.row("ours:rtn", 4)
    assert len(started.jobs) == 1
    assert json.loads((tmp_path / "out" / "ours-rtn-4-sym.json").read_text()) == [3.0, 2.0, 1]


def test_jobs_that_fail_or_hang(quantizers: Any, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    with pytest.raises(quantizers.Failed, match="no such thing"):
        quantizers.run(["sh", "-c", "echo first; echo no such thing; exit 3"], {}, log, 60)
    assert log.read_text() == "first\nno such thing\n"
    with pytest.raises(quantizers.Failed, match="ended after 1 s"):
        quantizers.run(["sleep", "60"], {}, log, 1)
    seconds, cores, peak = quantizers.run(["sh", "-c", 'test "$A" = b'], {"A": "b"}, log, 60)
    assert min(seconds, cores) >= 0 < peak
    assert not log.exists()
