"""Quantizing and converting models with recurrent layers: projections are quantized, what makes decays stays float, and
the files are those that transformers reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity import tiny_models
from tests.parity.engine_logits import engine_logits
from tests.parity.gguf_models import CHANGED
from tests.parity.tiny_recurrent import RECURRENT, _mamba2
from tests.unit.quantize.ggml.test_export import save_tokenizer
from tests.unit.quantize.test_convert import add_tokenizer, assert_same_numbers
from tokenmill.checkpoint.configs.tensor_names import canonical, naming_of, stored_name
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import UserError
from tokenmill.quantize.calibrate import CalibratedBlock, HiddenStates
from tokenmill.quantize.convert import convert
from tokenmill.quantize.finish import GateRequest
from tokenmill.quantize.ggml.export import quantize_gguf
from tokenmill.quantize.gguf_job import GGUFJob, collect_importance
from tokenmill.quantize.job import QuantizeJob, prepare, run_job
from tokenmill.quantize.recipe import RecipeRequest
from tokenmill.quantize.source import HEAD, SourceModel

IDS = torch.randint(3, 131, (40,), generator=torch.Generator().manual_seed(0)).tolist()
_KEPT = ("A_log", "D", "dt_bias", "dt_proj.weight", "dt_proj.bias", "in_proj_ba.weight", "in_proj_a.weight")
_QUANTIZED = (
    "in_proj.weight_packed",
    "out_proj.weight_packed",
    "in_proj_qkvz.weight_packed",
    "in_proj_qkv.weight_packed",
)
_TEXT = "Once upon a time there was a small boat that wanted to see the sea. " * 60


def _job(model: Path, out: Path, recipe: RecipeRequest, **changes: Any) -> QuantizeJob:
    return QuantizeJob(str(model), out, recipe, gate=GateRequest(enabled=False), **changes)


def _distance(model: Path, out: Path) -> float:
    expected = engine_logits(model, IDS, "eager")
    return float((engine_logits(out, IDS, "eager") - expected).square().mean().sqrt() / expected.std())


@pytest.mark.parametrize("name", list(RECURRENT))
def test_the_calibration_pass_is_the_model(name: str, tmp_path: Path) -> None:
    oracle = tiny_models.make(name, tmp_path)
    ids = torch.randint(0, 131, (3, 40), generator=torch.Generator().manual_seed(0))
    source = SourceModel(open_checkpoint(tmp_path), 40)
    states = HiddenStates(source.embed(ids), 2)
    for index in range(source.num_blocks):
        CalibratedBlock(source, index, states).advance()
    x = source.decoder.norm.of_tensor(states.values.flatten(0, 1)).view_as(states.values)
    with torch.no_grad():
        expected = oracle(ids).logits
    found = x @ source.read_edge(HEAD).T * source.description.logit_scale
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "jamba-experts", "qwen3_next", "falcon_h1"])
def test_a_block_has_gradients(name: str, tmp_path: Path) -> None:
    """Methods that learn their rounding need them."""
    tiny_models.make(name, tmp_path)
    source = SourceModel(open_checkpoint(tmp_path), 40)
    ids = torch.randint(0, 131, (2, 40), generator=torch.Generator().manual_seed(0))
    block = CalibratedBlock(source, 0, HiddenStates(source.embed(ids), 2))
    first = block.groups[0].names[0]
    weight = block.weight(first).clone().requires_grad_()
    block.forward(block.inputs()[0], {first: weight}).square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()
    assert weight.grad.abs().max() > 0


# Its norms of time steps, B and C have no weights. Whether they only magnify the rounding is not shown yet.
_OPEN = pytest.mark.xfail(reason="a distance of 0.054 was measured", strict=False)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=_OPEN if name == "falcon_mamba" else ()) for name in RECURRENT]
)
def test_eight_bits_compute_nearly_the_same(name: str, tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    tiny_models.make(name, model)
    add_tokenizer(model)
    run_job(prepare(_job(model, out, RecipeRequest("rtn", bits=8, group_size=16), dtype="float32")))
    stored = load_file(out / "model.safetensors")
    assert any(each.endswith(_QUANTIZED) for each in stored)
    original = load_file(model / "model.safetensors")
    for each in original:
        if each.endswith((*_KEPT, "conv1d.weight", "conv1d.bias")):
            assert torch.equal(stored[each], original[each].float()), each  # under its own name
    assert _distance(model, out) < 0.05


def test_states_keep_their_precision_in_a_file_of_halves(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    tiny_models.make("mamba", model)
    add_tokenizer(model)
    run_job(prepare(_job(model, out, RecipeRequest("rtn", bits=8, group_size=16), dtype="bfloat16")))
    stored = load_file(out / "model.safetensors")
    types = {each.rpartition("mixer.")[2]: tensor.dtype for each, tensor in stored.items() if ".layers.0." in each}
    assert {types[each] for each in ("A_log", "D", "dt_proj.weight", "dt_proj.bias")} == {torch.float32}
    assert types["conv1d.weight"] == torch.bfloat16


def test_the_text_part_of_a_larger_model(tmp_path: Path) -> None:
    """As Qwen3.5 is published: beside an image tower, and with layers for drafts."""
    plain, model, out = tmp_path / "plain", tmp_path / "model", tmp_path / "out"
    tiny_models.make("qwen3_5", plain)
    text = json.loads((plain / "config.json").read_text())
    model.mkdir()
    wrapper = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {"model_type": "qwen3_5", "hidden_size": 32, "depth": 1},
        "image_token_id": 7,
    }
    (model / "config.json").write_text(json.dumps(wrapper))
    tensors = load_file(plain / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
    others = ("model.visual.blocks.0.norm1.weight", "mtp.fc.weight")
    save_file({**renamed, **{name: torch.ones(4, 4) for name in others}}, model / "model.safetensors")
    assert torch.equal(engine_logits(model, IDS, "eager"), engine_logits(plain, IDS, "eager"))
    add_tokenizer(model)
    run_job(prepare(_job(model, out, RecipeRequest("rtn", bits=8, group_size=16), dtype="float32")))
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["model_type"] == text["model_type"]
    assert not {"text_config", "vision_config"} & set(config)
    assert _distance(plain, out) < 0.05


@pytest.fixture(scope="module")
def spoken(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mamba 2 with the tokenizer of stories15m."""
    folder = tmp_path_factory.mktemp("recurrent")
    sizes = {**tiny_models._COMMON, "vocab_size": 32000}
    tiny_models.CONFIGS["mamba2-tokens"] = lambda: _mamba2(sizes)
    try:
        tiny_models.make("mamba2-tokens", folder)
    finally:
        del tiny_models.CONFIGS["mamba2-tokens"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path("stories15m") / name, folder / name)
    return folder


@pytest.mark.parametrize("method", ["gptq", "awq+rtn"])
def test_methods_with_calibration(method: str, spoken: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(_TEXT)
    recipe = RecipeRequest(method, bits=8, group_size=32)
    options = {"calibration": text, "calibration_samples": 4, "calibration_length": 64, "dtype": "float32"}
    run_job(prepare(_job(spoken, tmp_path / "out", recipe, **options)))
    assert _distance(spoken, tmp_path / "out") < 0.05


def test_importance_of_every_matrix(spoken: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(_TEXT)
    job = GGUFJob(str(spoken), tmp_path / "m.gguf", "imatrix", "Q4_K_M", None, text, 4, 64)
    checkpoint = open_checkpoint(spoken)
    found = collect_importance(checkpoint, spoken, job, 0, torch.device("cpu"), lambda *_: None)
    assert set(found) == {*SourceModel(checkpoint, 8).layer_linears(), HEAD}
    assert all(bool((values > 0).any()) for values in found.values())


def test_a_rotation_is_refused_by_name(spoken: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="mamba2 has recurrent layers"):
        run_job(prepare(_job(spoken, tmp_path / "out", RecipeRequest("rotation+rtn", bits=4, group_size=32))))


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "mamba2"])
def test_a_gguf_and_back(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_models.make(name, model)
    add_tokenizer(model)
    convert(model, tmp_path / "there.gguf", "gguf")
    convert(tmp_path / "there.gguf", tmp_path / "back", "safetensors")
    assert_same_names(model, tmp_path / "back")
    torch.testing.assert_close(
        engine_logits(tmp_path / "back", IDS, "eager"), engine_logits(model, IDS, "eager"), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "name",
    ["jamba-experts", "granitemoehybrid", "granitemoehybrid-experts", "falcon_h1", "falcon_h1-plain", "qwen3_next"],
)
def test_a_gguf_of_a_hybrid(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multipliers in the weights, joined matrices apart: it computes the same."""
    if name in CHANGED:
        monkeypatch.setitem(tiny_models.CONFIGS, name, CHANGED[name])
    model, there, again = tmp_path / "model", tmp_path / "there.gguf", tmp_path / "again.gguf"
    tiny_models.make(name, model)
    save_tokenizer(model, "qwen2")
    quantize_gguf(open_checkpoint(model), there, "F32")
    expected = engine_logits(model, IDS, "eager")
    torch.testing.assert_close(engine_logits(there, IDS, "eager"), expected, rtol=1e-4, atol=1e-4)
    quantize_gguf(open_checkpoint(there), again, "F32")
    assert torch.equal(engine_logits(again, IDS, "eager"), engine_logits(there, IDS, "eager"))
    with pytest.raises(UserError, match="cannot be written, only taken over"):
        prepare(_job(there, tmp_path / "out", RecipeRequest("rtn", bits=8, group_size=16)))


def test_codes_of_a_hybrid_move_between_formats(tmp_path: Path) -> None:
    model, out, moved = tmp_path / "model", tmp_path / "out", tmp_path / "moved"
    tiny_models.make("bamba", model)
    add_tokenizer(model)
    recipe = RecipeRequest("rtn", bits=8, group_size=32)
    run_job(prepare(_job(model, out, recipe, dtype="float32", format="compressed-tensors")))
    convert(out, moved, "safetensors")
    assert_same_numbers(out, moved)
    assert_same_names(model, moved)


def assert_same_names(a: Path, b: Path) -> None:
    names = [set(load_file(folder / "model.safetensors")) for folder in (a, b)]
    assert names[0] == names[1]


@pytest.mark.parametrize("architecture", ["mamba2", "jamba"])
def test_names_of_files_are_the_inverse_of_canonical_ones(architecture: str, tmp_path: Path) -> None:
    tiny_models.make(architecture, tmp_path)
    naming = naming_of(architecture)
    for name in load_file(tmp_path / "model.safetensors"):
        found = canonical(naming, name)
        assert found is not None
        assert stored_name(naming, found.name) == name
