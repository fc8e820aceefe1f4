"""`tokenmill optimize --load-format dummy`: a config.json is enough to measure speed; quality is not claimed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from tests.gpu.models import write_config
from tokenmill.cli.main import main

_WORK = ["--input-len", "16", "--output-len", "4", "--concurrency", "2", "--runs", "1", "--minutes", "0.1"]
_DUMMY = ["--load-format", "dummy", "--device", "cpu"]


def test_speed_of_a_config_is_measured_and_no_quality_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    model, out = write_config(tmp_path / "shape"), tmp_path / "out"
    flags = [*_WORK, *_DUMMY, "--quality", "off", "--kv-cache-dtypes", "float32,int8", "--json"]
    assert main(["optimize", str(model), "--out", str(out), *flags]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["made_up"]
    assert answer["quality_loss"] is None
    assert any("nothing is claimed about quality" in each for each in answer["not_shown"])
    results = json.loads((out / "results.json").read_text())
    assert results["baseline"]["weights"] == "stored"
    timed = [each for each in results["candidates"] if each["speed"]]
    assert {each["weights"] for each in timed} == {"stored"}
    # The baseline itself is among them where nothing was cheaper, as on a busy machine: it is measured, not predicted.
    others = [each for each in timed if each["name"] != results["baseline"]["name"]]
    assert others
    assert all(each["prediction"] for each in others)
    assert all(each["speed"]["memory_bytes"] > 0 and each["quality"] is None for each in timed)
    assert not list((tmp_path / "cache").rglob("*.gguf"))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert yaml.safe_load((out / "serve.yaml").read_text())["load-format"] == "dummy"
    for name in ("serve.yaml", "launch.txt", "report.html", "kubernetes/serving.yaml"):
        text = (out / name).read_text()
        assert "--load-format dummy" in text, name
        assert "nothing is claimed about quality" in text, name
    repeated = results["commands"][1:]  # the first is the command of this process
    assert repeated
    assert all("--load-format dummy" in each for each in repeated)


def test_made_up_weights_have_no_quality_and_make_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_config(tmp_path / "shape")
    command = ["optimize", str(model), "--out", str(tmp_path / "out"), *_DUMMY]
    assert main(command) == 2
    assert "--quality off" in capsys.readouterr().err
    assert main([*command, "--quality", "off", "--candidates", "Q4_K_M"]) == 2
    assert "--candidates" in capsys.readouterr().err
