"""`tokenmill optimize` on a real model: a winner, a failure that is recorded, a second run from the cache, Ctrl-C, and
the report in a real browser."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.webdriver import chromium
from tokenmill.cli.main import main
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.kvstore.dense import Float32Store

_WORK = [
    "--input-len", "24", "--output-len", "8", "--concurrency", "2", "--runs", "3", "--quality-tokens", "1024",
    "--rivals", "none",
]  # fmt: skip
_STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her dog. "


class BrokenStore(Float32Store):
    """A KV dtype that somebody registered and that does not work."""

    name = "broken"

    def __init__(self, *_arguments: Any) -> None:
        raise RuntimeError("no pages of this kind")


@pytest.fixture(scope="module")
def model(model_path: Callable[[str], Path]) -> Path:
    return model_path("stories15m")


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With a cache of its own for what is quantized; the model was found in the ordinary one."""
    assert model.exists()
    path = tmp_path_factory.mktemp("optimize")
    (path / "story.txt").write_text(_STORY * 120)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENMILL_CACHE", str(path / "cache"))
        KV_STORES.register("broken", "tests.e2e.test_optimize:BrokenStore")
        yield path
        KV_STORES.unregister("broken")


def _command(model: Path, folder: Path, out: str, *more: str) -> list[str]:
    flags = ["--text", str(folder / "story.txt"), "--max-quality-loss", "3%", "--minutes", "10", "--json"]
    return ["optimize", str(model), "--out", str(folder / out), *_WORK, *flags, *more]


@pytest.fixture(scope="module")
def finished(model: Path, folder: Path) -> Path:
    """One whole run: a good candidate, one that cannot be made (288 columns, blocks of 64), a broken KV dtype."""
    names = ["--candidates", "Q8_0,nf4", "--kv-cache-dtypes", "float32,float16,broken", "--gpu", "h100"]
    assert main(_command(model, folder, "out", *names)) == 0
    return folder / "out"


def _results(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


def test_it_finds_a_winner_and_writes_everything(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _results(finished)
    assert found["state"] == "complete"
    assert found["chosen"]["weights"] == "Q8_0"
    assert found["quality_loss"] < 0.03
    assert found["chosen"]["quality"]["tokens"] > 500
    assert found["chosen"]["speed"]["runs"] == 3
    assert found["cost_reduction"] == pytest.approx(1 - found["chosen"]["speed"]["cost_ratio"])
    assert found["baseline"]["weights"] in ("F16", "F32", "BF16")
    assert len(found["baseline_variants"]) >= 2
    assert found["projections"][0]["gpu"] == "h100"
    code = main(["run", str(finished / "model.gguf"), "Once upon a time", "--raw", "--max-tokens", "6", "--json"])
    assert code == 0
    assert json.loads(capsys.readouterr().out)["completion_tokens"] == 6


def test_serve_takes_its_settings(finished: Path) -> None:
    from tokenmill.serve.config import read_config_file, split_options

    _, engine = split_options(read_config_file(str(finished / "serve.yaml")))
    chosen = _results(finished)["chosen"]
    assert (engine.kv_cache_dtype, engine.batch_tokens) == (chosen["kv"], chosen["batch_tokens"])
    assert "llama-server" in (finished / "launch.txt").read_text()


def test_failures_are_recorded_with_their_reason(finished: Path) -> None:
    verdicts = {each["name"]: each for each in _results(finished)["candidates"]}
    broken = next(each for name, each in verdicts.items() if "/broken/" in name)
    assert broken["verdict"] == "failed"
    assert "no pages of this kind" in broken["reason"]
    assert verdicts["nf4"]["verdict"] in ("failed", "unlikely")
    assert verdicts["nf4"]["reason"]


def test_a_second_run_measures_nothing_and_chooses_the_same(
    finished: Path,
    model: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tokenmill.optimize import contender_pool

    monkeypatch.setattr(contender_pool, "Contender", None)  # loading an engine to be timed would fail
    before = _results(finished)
    names = ["--candidates", "Q8_0,nf4", "--kv-cache-dtypes", "float32,float16,broken"]
    assert main(_command(model, folder, "out", *names)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["chosen"] == before["chosen"]["name"]
    assert printed["cost_reduction"] == pytest.approx(before["cost_reduction"])
    assert set(printed) >= {"chosen", "cost_reduction", "quality_loss", "report"}


@pytest.mark.slow  # tests/unit/optimize trains and times one
def test_drafters_are_tried_where_the_prompts_are_text(
    model: Path, folder: Path, finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.optimize.halving._MAX_REPEATS", 1)  # who wins is not asked here
    monkeypatch.setattr("tokenmill.optimize.artefacts.TRAINING_TOKENS", 600)  # nor how well a drafter guesses
    monkeypatch.setattr("tokenmill.optimize.artefacts.TRAINING_STEPS", 2)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": _STORY * count}) + "\n" for count in (1, 2)))
    names = ["--candidates", "Q8_0", "--kv-cache-dtypes", "float32", "--prompts", str(prompts)]
    assert main(_command(model, folder, "drafted", *names)) == 0
    capsys.readouterr()
    drafted, random = (json.loads((path / "results.json").read_text()) for path in (folder / "drafted", finished))
    leader = drafted["candidates"][0]
    assert leader["speculate"] == "off"
    tried = {each["speculate"]: each for each in drafted["candidates"] if each["kv"] == leader["kv"]}
    assert set(tried) >= {"off", "ngram", "suffix", "self:q2_k", "head"}
    assert tried["ngram"]["divergence"] == leader["divergence"], "guesses change no prediction"
    assert tried["ngram"]["speed"] is not None
    assert {each["speculate"] for each in random["candidates"]} == {"off"}


def test_another_question_in_the_same_folder_is_refused(
    finished: Path, model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finished.is_dir()
    assert main(_command(model, folder, "out", "--seed", "7")) == 2
    assert "another" in capsys.readouterr().err


def test_ctrl_c_leaves_a_report(model: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "tokenmill", *_command(model, folder, "stopped", "--candidates", "Q8_0")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if "baseline" in line:  # the loop is under way
            process.send_signal(signal.SIGINT)
            break
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 130, "".join(said) + rest
    assert "report so far" in rest
    assert any("needs up to" in line for line in said)
    assert _results(folder / "stopped")["state"] == "interrupted"
    assert "interrupted" in (folder / "stopped" / "report.html").read_text()


def test_the_report_opens_without_network_and_shows_its_plots(finished: Path) -> None:
    text = (finished / "report.html").read_text()
    assert "<script" not in text
    assert "https://" not in text
    with chromium() as browser:
        browser.go((finished / "report.html").as_uri())
        assert browser.text("#chosen") == _results(finished)["chosen"]["name"]
        for plot in ("pareto", "predicted", "layers"):
            box = browser.run(
                "const b = document.querySelector('svg[data-chart=' + arguments[0] + ']').getBoundingClientRect();"
                "return [b.width, b.height]",
                plot,
            )
            assert min(box) > 50, plot
        assert browser.run("return document.querySelectorAll('svg[data-chart=pareto] circle').length") >= 2
        assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
        assert browser.console() == []
        shot = browser.screenshot()
        assert len(shot) > 10_000
        if saved := os.environ.get("TOKENMILL_SCREENSHOTS"):
            (Path(saved) / "optimize.png").write_bytes(shot)
