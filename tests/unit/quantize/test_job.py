"""The job: resumes after a kill with identical files, and refuses before any work what cannot end well."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity.tiny_models import make
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.engine.llm import LLM
from tokenmill.errors import UserError
from tokenmill.evaluate import divergence, reference
from tokenmill.quantize import edges, forecast
from tokenmill.quantize.finish import GateRequest
from tokenmill.quantize.job import QuantizeJob, prepare, run_job
from tokenmill.quantize.recipe import RecipeRequest
from tokenmill.quantize.source import SourceModel
from tokenmill.quantize.workspace import Workspace
from tokenmill.types import SamplingParams

_TEXT = "Once upon a time there was a small boat that wanted to see the sea. " * 60


@pytest.fixture(scope="module")
def model(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny qwen2 with the tokenizer of stories15m: a whole model that takes a second."""
    from transformers import Qwen2Config

    from tests.parity import tiny_models

    folder = tmp_path_factory.mktemp("tiny")
    tiny_models.CONFIGS["qwen2-tokens"] = lambda: Qwen2Config(
        **{**tiny_models._COMMON, "vocab_size": 32000}, tie_word_embeddings=True
    )
    try:
        make("qwen2-tokens", folder)
    finally:
        del tiny_models.CONFIGS["qwen2-tokens"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = model_path("stories15m") / name
        if file.is_file():
            shutil.copy(file, folder / name)
    return folder


@pytest.fixture
def job(model: Path, tmp_path: Path) -> QuantizeJob:
    text = tmp_path / "text.txt"
    text.write_text(_TEXT)
    return QuantizeJob(
        str(model),
        tmp_path / "out",
        RecipeRequest("gptq", group_size=32),
        calibration=text,
        calibration_samples=6,
        calibration_length=32,
        threads=1,
        gate=GateRequest(enabled=False),
    )


def _hashes(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


_CHILD = """
import os, signal, sys
from pathlib import Path
from tokenmill.quantize import block_job
from tokenmill.quantize.finish import GateRequest
from tokenmill.quantize.job import QuantizeJob, prepare, run_job
from tokenmill.quantize.methods.gptq import Gptq
from tokenmill.quantize.recipe import RecipeRequest
model, out, text, where = sys.argv[1:]
def die():
    os.kill(os.getpid(), signal.SIGKILL)
if where == "inside":
    solve = Gptq._solve_group
    calls = []
    def counted(self, *rest):
        calls.append(1)
        if len(calls) == 7:  # four groups a block: in the middle of the second
            die()
        return solve(self, *rest)
    Gptq._solve_group = counted
job = QuantizeJob(model, Path(out), RecipeRequest("gptq", group_size=32), calibration=Path(text),
                  calibration_samples=6, calibration_length=32, threads=1, gate=GateRequest(enabled=False))
run_job(prepare(job), lambda done, total, left: die() if where == "between" and done == 2 else None)
"""


@pytest.mark.parametrize(("moment", "finished"), [("between", 2), ("inside", 1)])
def test_a_killed_job_resumes_to_the_identical_files(
    moment: str, finished: int, job: QuantizeJob, tmp_path: Path
) -> None:
    whole = run_job(prepare(replace(job, out=tmp_path / "whole")))
    assert whole.resumed_blocks == 0
    arguments = [job.model, str(job.out), str(job.calibration), moment]
    died = subprocess.run([sys.executable, "-c", _CHILD, *arguments], capture_output=True, text=True, timeout=300)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not job.out.exists()
    report = run_job(prepare(job))
    assert report.resumed_blocks == finished
    assert _hashes(job.out) == _hashes(tmp_path / "whole")
    assert not job.out.with_name("out.partial").exists()


def test_unfinished_work_of_another_job_is_not_continued(job: QuantizeJob) -> None:
    Workspace(job.out, "another")
    with pytest.raises(UserError, match="--restart"):
        run_job(prepare(job))
    report = run_job(prepare(replace(job, restart=True)))
    assert report.resumed_blocks == 0
    assert open_checkpoint(job.out).quantization()["quant_method"] == "compressed-tensors"


def test_report_and_card(job: QuantizeJob) -> None:
    told: list[tuple[int, int]] = []
    report = run_job(prepare(job), lambda done, total, _left: told.append((done, total)))
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert report.bits_per_weight == pytest.approx(4.5, abs=0.1)  # weight_shape counts on matrices this small
    assert report.bytes == sum(file.stat().st_size for file in job.out.iterdir())
    assert len(report.layers) == 21
    assert 0 < report.fidelity["weight_error_mean"] < 0.3
    card = (job.out / "README.md").read_text()
    assert "--no-gate" in card
    assert hashlib.sha256((job.out / "model.safetensors").read_bytes()).hexdigest() in card
    assert "6 sequences of 32 tokens of text.txt" in card
    assert "model.layers.2.mlp.down_proj" in card


@pytest.mark.parametrize("method", ["rotation+rtn", "spinquant+rtn"])
def test_a_block_that_is_left_out_is_turned_with_the_others(method: str, job: QuantizeJob) -> None:
    request = RecipeRequest(method, bits=8, group_size=32, ignore=(r"re:model\.layers\.0\..*",))
    run_job(prepare(replace(job, recipe=request)))
    tokens, logprobs = [1, 5, 9, 13, 7, 100, 2000, 31000], []
    for path in (job.model, str(job.out)):
        with LLM(path, context=64, concurrency=1, kernels="ref") as llm:
            output = llm.generate([tokens], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
        assert output.prompt_logprobs is not None
        found = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
        logprobs.append(torch.tensor([each[token].logprob for token, each in found if each is not None]))
    assert float((logprobs[0] - logprobs[1]).abs().max()) < 0.02


def test_bad_input_is_refused_before_any_work(
    job: QuantizeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [
        (replace(job, calibration_samples=10_000), "need 320000"),
        (replace(job, calibration_length=4096), "more than the 256 tokens"),
        (replace(job, recipe=RecipeRequest("gptq", group_size=128)), "not a multiple of the group size 128"),
        (replace(job, recipe=RecipeRequest("gptq", ignore=("model.layers.9.mlp.up_proj",))), "the nearest are"),
        (replace(job, recipe=RecipeRequest("rtn", group_size=32, symmetric=False), format="gptq"), "gptq_v2"),
        (replace(job, recipe=RecipeRequest("rtn", bits=3, group_size=32), format="awq"), "compressed-tensors"),
        (replace(job, format="awq2"), "did you mean 'awq'"),
        (replace(job, dtype="float8"), "--dtype float8"),
        (replace(job, recipe=RecipeRequest("gptq", group_size=-32)), "groups of -32 weights cannot be"),
        (replace(job, recipe=RecipeRequest("gptq", group_size=32, options=(("damping", "NaN"),))), "damping is nan"),
        (replace(job, recipe=RecipeRequest("gptq", group_size=32, options=(("damping", "1.5"),))), "damping is 1.5"),
        (replace(job, recipe=RecipeRequest("gptq", group_size=32, options=(("norm", "-2"),))), "norm is -2"),
        (replace(job, recipe=RecipeRequest("gptq", group_size=32, options=(("least_tokens", "2"),))), "least_tokens"),
        (replace(job, tune=2, calibration_samples=1), "held out too"),
        (replace(job, out=tmp_path / "none" / "out"), "is not a directory"),
        (replace(job, out=tmp_path), "exists"),
    ]
    for case, message in cases:
        with pytest.raises(UserError, match=message):
            prepare(case)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(1, 1, 1000))
    with pytest.raises(UserError, match="MiB on the disk"):
        prepare(job)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["text.txt"]


def test_a_full_disk_during_the_job_keeps_what_is_finished(job: QuantizeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenmill.quantize import workspace

    save = workspace.save_file

    def fails_on_the_second_block(tensors: object, path: Path, metadata: object) -> None:
        if Path(path).name == "block-00001.writing":
            raise OSError(28, "No space left on device")
        save(tensors, path, metadata)

    monkeypatch.setattr(workspace, "save_file", fails_on_the_second_block)
    prepared = prepare(job)
    with pytest.raises(UserError, match="run the same command again"):
        run_job(prepared)
    assert not job.out.exists()
    monkeypatch.undo()
    assert run_job(prepared).resumed_blocks == 1


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_tuned_scales_are_what_the_files_hold(method: str, job: QuantizeJob, tmp_path: Path) -> None:
    request = RecipeRequest(method, bits=3, group_size=32)
    plain = run_job(prepare(replace(job, recipe=request, out=tmp_path / "plain")))
    report = run_job(prepare(replace(job, recipe=request, tune=6)))
    tuned = report.fidelity["tuned"]
    assert tuned["steps"] == 6
    assert tuned["kept"] == (tuned["after"] < tuned["before"])
    assert (_hashes(job.out)["config.json"], plain.bytes) == (_hashes(tmp_path / "plain")["config.json"], plain.bytes)
    weights = "model.safetensors"
    assert (_hashes(job.out)[weights] != _hashes(tmp_path / "plain")[weights]) == tuned["kept"]
    with LLM(str(job.out), context=64, concurrency=1, kernels="ref") as llm:
        assert llm.generate([[1, 5, 9]])[0].outputs[0].token_ids


def test_what_a_head_of_its_own_learned_is_in_its_table(job: QuantizeJob, tmp_path: Path) -> None:
    """Rotations untie it from the embedding; tied, both stay."""
    changed = {}
    for method in ("rtn", "rotation+rtn"):
        request = RecipeRequest(method, bits=2, group_size=32)
        plain, out = tmp_path / f"{method}-plain", tmp_path / method
        run_job(prepare(replace(job, recipe=request, out=plain)))
        report = run_job(prepare(replace(job, recipe=request, out=out, tune=20)))
        assert report.fidelity["tuned"]["kept"]
        before, after = (load_file(folder / "model.safetensors") for folder in (plain, out))
        assert before.keys() == after.keys()
        edges = [name for name in before if name in ("model.embed_tokens.weight", "lm_head.weight")]
        changed[method] = [name for name in edges if not torch.equal(before[name], after[name])]
    assert changed == {"rtn": [], "rotation+rtn": ["lm_head.weight"]}


class _Stop(Exception):
    pass


@pytest.mark.parametrize("file_format", ["gptq", pytest.param("awq", marks=pytest.mark.slow)])
def test_mended_codes_are_written_and_resume(
    file_format: str, job: QuantizeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = RecipeRequest("gptq", bits=4, group_size=32, symmetric=file_format == "gptq")
    mended = replace(plain, options=(("metric", "fisher"), ("sweeps", "2")))
    job = replace(job, recipe=mended, format=file_format)
    run_job(prepare(replace(job, recipe=plain, out=tmp_path / "plain")))
    run_job(prepare(replace(job, out=tmp_path / "whole")))
    assert _hashes(tmp_path / "plain")["model.safetensors"] != _hashes(tmp_path / "whole")["model.safetensors"]

    def stop(done: int, _total: int, _left: float) -> None:
        if done == 2:
            raise _Stop

    with pytest.raises(_Stop):
        run_job(prepare(job), stop)
    monkeypatch.setattr(edges, "linear_grams", lambda *_: pytest.fail("the gradients were computed again"))
    assert run_job(prepare(job)).resumed_blocks == 2
    assert _hashes(job.out) == _hashes(tmp_path / "whole")


def test_mixed_precision_meets_its_average(job: QuantizeJob) -> None:
    request = RecipeRequest("mixed+rtn", group_size=32, options=(("average_bits", "3.5"),))
    report = run_job(prepare(replace(job, recipe=request)))
    assert len({layer["type_name"] for layer in report.layers}) > 1
    assert report.bits_per_weight <= 4.1  # 3.5 and the scales, and weight_shape on matrices this small
    groups = open_checkpoint(job.out).quantization()["config_groups"]
    assert isinstance(groups, dict)
    assert len(groups) == len({layer["type_name"] for layer in report.layers})


def test_one_model_at_a_time_measures_the_same(job: QuantizeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    alive, most = 0, 0

    class Counted(LLM):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            nonlocal alive, most
            super().__init__(*arguments, **options)
            alive += 1
            most = max(most, alive)

        def close(self) -> None:
            nonlocal alive
            super().close()
            alive -= 1

    monkeypatch.setattr(divergence, "LLM", Counted)
    monkeypatch.setattr(reference, "LLM", Counted)
    gate = GateRequest(text=job.calibration, max_quality_loss=10.0, max_chunks=1, threads=1)
    both = run_job(prepare(replace(job, gate=gate))).fidelity
    assert most == 2
    most = 0
    out = job.out.with_name("in_turn")
    found = run_job(prepare(replace(job, out=out, gate=replace(gate, in_turn=True)))).fidelity
    assert (most, alive) == (1, 0)
    assert found["perplexity_ratio"] == pytest.approx(both["perplexity_ratio"], rel=1e-9)
    assert found["kld_mean"] == pytest.approx(both["kld_mean"], abs=1e-6)
    assert not list(out.parent.glob("**/*.logits"))


def test_a_gate_that_does_not_fit_the_cap_is_refused_first(job: QuantizeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = replace(job, gate=GateRequest(text=job.calibration, in_turn=True))
    cap = prepare(gated).forecast.memory_bytes
    monkeypatch.setattr(forecast, "_ENGINE_BYTES", 2 * cap)
    with pytest.raises(UserError, match=r"measuring the result takes .* give --memory \d+MiB, or --no-gate"):
        prepare(replace(gated, memory=cap))


def test_a_harmful_result_is_set_aside(job: QuantizeJob) -> None:
    gated = replace(
        job,
        recipe=RecipeRequest("rtn", bits=2, group_size=32),
        gate=GateRequest(text=job.calibration, max_quality_loss=0.0, max_chunks=1, threads=1),
    )
    both = (
        r"refused: perplexity grows .*\(perplexity \+.*limit 0.00%; divergence .*kept as .*out.rejected; .*not written"
    )
    with pytest.raises(UserError, match=both):
        run_job(prepare(gated))
    assert not job.out.exists()
    assert not list(job.out.parent.glob("*.partial"))
    rejected = job.out.with_name("out.rejected")
    assert "perplexity" in (rejected / "reason.txt").read_text()
    assert "| max kld | 0 |" in (rejected / "README.md").read_text()
    assert "| perplexity ratio |" in (rejected / "README.md").read_text()


def test_a_divergence_alone_is_refused_and_the_default_is_what_a_careful_user_takes(job: QuantizeJob) -> None:
    """Perplexity may rise without bound here, but the predictions move too far."""
    assert GateRequest().max_quality_loss == 0.05
    gate = GateRequest(text=job.calibration, max_quality_loss=100.0, max_kld=1e-6, max_chunks=1, threads=1)
    with pytest.raises(UserError, match=r"refused: mean divergence .* is more than 1e-06 nats .*raise .*--max-kld"):
        run_job(prepare(replace(job, recipe=RecipeRequest("rtn", bits=3, group_size=32), gate=gate)))
    assert not job.out.exists()


@pytest.mark.parametrize("file_format", ["dense", "sparse-24"])
def test_pruned_floats_are_written_and_run(job: QuantizeJob, file_format: str) -> None:
    """Zeros written out, or left out and put back when loaded: the same model."""
    report = run_job(prepare(replace(job, recipe=RecipeRequest("sparsegpt"), format=file_format)))
    assert report.bits_per_weight == pytest.approx(16 if file_format == "dense" else 9, abs=0.1)
    stored = json.loads((job.out / "config.json").read_text()).get("quantization_config")
    assert (stored is None) == (file_format == "dense")
    weight = SourceModel(open_checkpoint(job.out), 32).read("model.layers.1.mlp.up_proj")
    assert bool(((weight == 0).view(weight.shape[0], -1, 4).sum(2) >= 2).all())
    with LLM(str(job.out), context=64, concurrency=1, threads=1) as llm:
        assert len(llm.generate(["Once"], SamplingParams(max_tokens=3, temperature=0))[0].outputs[0].token_ids) == 3


def test_kv_scales_are_written_and_used(job: QuantizeJob) -> None:
    job = replace(job, recipe=RecipeRequest("rtn", bits=8, group_size=32), kv_scales=True)  # data-free but for these
    run_job(prepare(job))
    checkpoint = open_checkpoint(job.out)
    config = json.loads((job.out / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"]["type"] == "float"
    with LLM(str(job.out), context=64, concurrency=1, threads=1, kv_cache_dtype="fp8") as llm:
        stored = checkpoint.tensor("model.layers.1.self_attn.k_scale").data
        scales = llm.parts.runtime.store.scales(1)
        assert scales is not None
        assert float(scales[0][0]) == pytest.approx(float(stored))
        assert 0 < float(stored) < 1
        assert len(llm.generate(["Once"], SamplingParams(max_tokens=3))[0].outputs[0].token_ids) == 3
    with pytest.raises(UserError, match="no place for KV scales"):
        prepare(replace(job, out=job.out.with_name("other"), format="gptq", recipe=RecipeRequest("rtn", group_size=32)))


def test_the_cheapest_blocks_are_dropped(job: QuantizeJob, model: Path) -> None:
    """Of five blocks the third does nothing: it goes, and the model that is left computes what it did before."""
    source, stored = job.out.with_name("wide"), load_file(model / "model.safetensors")
    shutil.copytree(model, source)
    deep = {key: value for key, value in stored.items() if ".layers." not in key}
    for place, origin in enumerate((0, 1, 0, 1, 0)):
        for key, value in stored.items():
            if f".layers.{origin}." in key:
                idle = place == 2 and key.endswith(("o_proj.weight", "down_proj.weight"))
                deep[key.replace(f".layers.{origin}.", f".layers.{place}.")] = value * (0.0 if idle else 1.0)
    save_file(deep, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config |= {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    (source / "config.json").write_text(json.dumps(config))
    small = replace(job, model=str(source), recipe=RecipeRequest("float"), dtype="float32", drop_layers=1)
    run_job(prepare(small))
    assert open_checkpoint(job.out).description.num_layers == 4
    written = load_file(job.out / "model.safetensors")
    assert torch.equal(written["model.layers.2.mlp.up_proj.weight"], deep["model.layers.3.mlp.up_proj.weight"])
    prompt, params = ["Once upon a"], SamplingParams(max_tokens=4, temperature=0)
    texts = []
    for path in (source, job.out):
        with LLM(str(path), context=64, concurrency=1, threads=1) as llm:
            texts.append(llm.generate(prompt, params)[0].outputs[0].token_ids)
    assert texts[0] == texts[1]
    with pytest.raises(UserError, match="at most 3"):
        prepare(replace(small, out=job.out.with_name("none"), drop_layers=4))
