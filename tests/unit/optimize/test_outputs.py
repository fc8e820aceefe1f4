"""The output directory: the model, the settings that were measured in every file that starts it, results and report."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from tests.unit.optimize import outcomes
from tokenmill.config import EngineConfig
from tokenmill.hardware.machine import Machine
from tokenmill.optimize.outputs import Workload, write_outputs
from tokenmill.optimize.results import Outcome
from tokenmill.serve.config import split_options

_WORKLOAD = Workload(EngineConfig(concurrency=4, prefix_caching=True), 2048, 64, 32, 256)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Machine("Linux", "aarch64", "Neoverse-N1", (), 2, 24 << 30, 20 << 30, ("NVIDIA H200, 143771 MiB",))
    monkeypatch.setattr("tokenmill.optimize.outputs.detect_machine", lambda: found)


def _written(folder: Path, outcome: Outcome, *, directory: bool = False) -> Path:
    """With the artefact of the chosen candidate on disk."""
    assert outcome.chosen is not None
    made = folder / "cache"
    made.mkdir()
    if directory:
        (made / "model.safetensors").write_bytes(b"weights")
        path = made
    else:
        path = made / "made.gguf"
        path.write_bytes(b"weights")
    artefact = outcomes.artefact("made")
    outcome.chosen.artefact = type(artefact)(str(path), 90_000_000, 4.8, 1.0, "tokenmill quantize m --out made")
    out = folder / "out"
    out.mkdir()
    write_outputs(out, outcome, _WORKLOAD)
    return out


def test_a_cpu_winner_starts_with_what_was_measured(tmp_path: Path) -> None:
    outcome = outcomes.cpu_without_objectives()
    assert outcome.chosen is not None
    outcome.chosen.kv, outcome.chosen.options = "int8", {"prefix_caching": False}
    out = _written(tmp_path, outcome)
    assert (out / "model.gguf").read_bytes() == b"weights"
    _, engine = split_options(yaml.safe_load((out / "serve.yaml").read_text()))
    assert (engine.kv_cache_dtype, engine.batch_tokens, engine.prefix_caching) == ("int8", 512, False)
    assert "--cache-type-k q8_0" in outcome.launch_lines["llamacpp"]
    manifest = (out / "kubernetes/serving.yaml").read_text()
    objects = {each["kind"]: each for each in yaml.safe_load_all(manifest)}
    assert yaml.safe_load(objects["ConfigMap"]["data"]["serve.yaml"]) == yaml.safe_load(
        (out / "serve.yaml").read_text()
    )
    arguments = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[:4] == ["serve", "/models/model.gguf", "--config", "/etc/serving/serve.yaml"]
    assert outcome.files["kubernetes/serving.yaml"] in manifest
    results = json.loads((out / "results.json").read_text())
    assert results["versions"]["tokenmill"]
    assert results["date"]
    assert "kind: Deployment" in (out / "report.html").read_text()


def test_a_gpu_winner_has_a_line_for_vllm(tmp_path: Path) -> None:
    outcome = outcomes.gpu_with_a_rival_that_wins()
    outcome.rivals[0].engine_version = "0.32.0"
    out = _written(tmp_path, outcome, directory=True)
    assert (out / "model/model.safetensors").exists()
    line = outcome.launch_lines["vllm"]
    assert line.startswith("vllm serve ")
    assert "--kv-cache-dtype fp8" in line
    assert outcome.versions["vllm"] == "0.32.0"


def test_a_kv_dtype_that_others_lack_is_said(tmp_path: Path) -> None:
    outcome = outcomes.cpu_without_objectives()
    assert outcome.chosen is not None
    outcome.chosen.kv = "kivi4"
    _written(tmp_path, outcome)
    assert "llamacpp (16-bit KV: it has no kivi4)" in outcome.launch_lines


def test_a_folder_with_odd_characters_is_quoted(tmp_path: Path) -> None:
    folder = tmp_path / "a b; rm -rf x"
    folder.mkdir()
    outcome = outcomes.cpu_without_objectives()
    out = _written(folder, outcome)
    assert shlex.split(outcome.launch_lines["tokenmill"])[2] == str(out / "model.gguf")
    assert str(out / "model.gguf") in shlex.split(outcome.launch_lines["llamacpp"])


def test_an_interrupted_run_has_a_report_and_no_model(tmp_path: Path) -> None:
    write_outputs(tmp_path, outcomes.interrupted(), _WORKLOAD)
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "report.html"}
