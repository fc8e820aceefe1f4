"""Merging adapters into a base and extracting them again: PEFT's merge is the oracle, the engine runs the result."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.engine_logits import engine_logits
from tests.parity.tiny_models import make
from tests.peft_adapters import make_adapter, save_merged
from tests.unit.quantize.test_convert import IDS, add_tokenizer, dense, quantized
from tokenmill.checkpoint.adapters.peft import read_adapter
from tokenmill.cli.main import main
from tokenmill.cli.render.draw import as_text
from tokenmill.cli.screens.convert import merge_screen
from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.convert import convert
from tokenmill.quantize.convert_source import ConvertSource
from tokenmill.quantize.extract import extract, factorize
from tokenmill.quantize.finish import GateRequest
from tokenmill.quantize.merge import AdapterChoice, MergeJob, Requantization, merge, parse_adapter
from tokenmill.quantize.recipe import RecipeRequest


def merged(base: Path, out: Path, *adapters: Path | tuple[Path, float], **options: Any) -> dict[str, Any]:
    choices = tuple(AdapterChoice(*each) if isinstance(each, tuple) else AdapterChoice(each) for each in adapters)
    return merge(MergeJob(str(base), out, choices, **options))


def assert_same_floats(a: Path, b: Path, tolerance: float = 1e-5) -> None:
    first, second = ConvertSource(a), ConvertSource(b)
    assert sorted(first.matrices) == sorted(second.matrices)
    for name in first.matrices:
        rows = first.shape(name)[0]
        ours, theirs = first.floats(name, 0, rows), second.floats(name, 0, rows)
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance, msg=name)
    for name in first.vectors:
        torch.testing.assert_close(first.as_used(name), second.as_used(name), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_dora": True, "use_rslora": True},
        {"target_modules": ["embed_tokens", "lm_head", "k_proj"]},
        {"modules_to_save": ["lm_head", "post_attention_layernorm"]},
    ],
    ids=["lora", "rsdora", "edges", "whole"],
)
def test_merged_weights_are_pefts(tmp_path: Path, settings: dict[str, Any]) -> None:
    base = dense(tmp_path / "base")
    peft = make_adapter(base, tmp_path / "adapter", **settings)
    with torch.no_grad():
        expected = peft(torch.tensor([IDS])).logits[0]
    report = merged(base, tmp_path / "out", tmp_path / "adapter")
    assert report["lossless"]
    assert_same_floats(tmp_path / "out", save_merged(peft, tmp_path / "merged"))
    torch.testing.assert_close(engine_logits(tmp_path / "out", IDS, "eager"), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head"]])
def test_a_tied_model_is_untied_where_one_of_the_two_changes(tmp_path: Path, targets: list[str]) -> None:
    base = dense(tmp_path / "base", "llama-tied")
    peft = make_adapter(base, tmp_path / "adapter", target_modules=[*targets, "q_proj"])
    with torch.no_grad():
        expected = peft(torch.tensor([IDS])).logits[0]  # unmerged: PEFT's own merge would change both
    merged(base, tmp_path / "out", tmp_path / "adapter")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    torch.testing.assert_close(engine_logits(tmp_path / "out", IDS, "eager"), expected, atol=1e-4, rtol=1e-4)


def test_weights_scale_the_difference_and_add_up(tmp_path: Path) -> None:
    base = dense(tmp_path / "base")
    make_adapter(base, tmp_path / "a", seed=1)
    make_adapter(base, tmp_path / "b", seed=2, use_dora=True, modules_to_save=["lm_head"])
    merged(base, tmp_path / "only-a", tmp_path / "a")
    merged(base, tmp_path / "only-b", tmp_path / "b")
    merged(base, tmp_path / "both", (tmp_path / "a", 0.7), (tmp_path / "b", -0.25))
    merged(base, tmp_path / "turned", (tmp_path / "b", -0.25), (tmp_path / "a", 0.7))
    assert_same_floats(tmp_path / "both", tmp_path / "turned", 1e-6)
    sources = [ConvertSource(tmp_path / name) for name in ("base", "only-a", "only-b", "both")]
    for name in sources[0].matrices:
        rows = sources[0].shape(name)[0]
        plain, a, b, both = (source.floats(name, 0, rows) for source in sources)
        torch.testing.assert_close(both, plain + 0.7 * (a - plain) - 0.25 * (b - plain), atol=1e-5, rtol=1e-5)


def test_a_gguf_base_and_a_gguf_result(tmp_path: Path) -> None:
    """The rows of q and k lie by pairs in the base; the result lies as its own format has it."""
    base = dense(tmp_path / "base")
    peft = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "k_proj", "up_proj"])
    convert(base, tmp_path / "base.gguf", "gguf")
    merged(tmp_path / "base.gguf", tmp_path / "out", tmp_path / "adapter")
    merged(tmp_path / "base.gguf", tmp_path / "out.gguf", tmp_path / "adapter", format="gguf")
    expected = save_merged(peft, tmp_path / "merged")
    assert_same_floats(tmp_path / "out", expected)
    assert_same_floats(tmp_path / "out.gguf", expected)
    assert not list(tmp_path.glob(".*"))


def test_a_quantized_base_is_expanded(tmp_path: Path) -> None:
    """Floats of the result are those of the codes plus the adapter's change: base plus adapter, exactly."""
    base = quantized(tmp_path / "base", "gptq", Scheme("int", 4, 32))
    convert(base, tmp_path / "floats", "safetensors")
    peft = make_adapter(tmp_path / "floats", tmp_path / "adapter")
    report = merged(base, tmp_path / "out", tmp_path / "adapter")
    assert report["base_is_quantized"]
    assert_same_floats(tmp_path / "out", save_merged(peft, tmp_path / "merged"))


@pytest.fixture(scope="module")
def worded(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the tokenizer of stories15m, so that text can be measured."""
    from transformers import LlamaConfig

    from tests.parity import tiny_models

    folder = tmp_path_factory.mktemp("worded")
    tiny_models.CONFIGS["worded"] = lambda: LlamaConfig(**{**tiny_models._COMMON, "vocab_size": 32000})
    try:
        make("worded", folder)
    finally:
        del tiny_models.CONFIGS["worded"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (model_path("stories15m") / name).is_file():
            shutil.copy(model_path("stories15m") / name, folder / name)
    return folder


def test_requantizing_is_measured_against_base_plus_adapter(worded: Path, tmp_path: Path) -> None:
    make_adapter(worded, tmp_path / "adapter", size=0.3)
    gate = GateRequest(max_chunks=2, max_quality_loss=10.0, max_kld=10.0, threads=1)
    request = Requantization(RecipeRequest("rtn", bits=8, group_size=32), device="cpu", gate=gate)
    report = merged(worded, tmp_path / "out", tmp_path / "adapter", requantize=request)
    assert report["fidelity"]["gate"] == "passed"
    assert (
        0 < report["fidelity"]["kld_mean"] < report["adapter_effect"]["kld_mean"]
    )  # rounding costs less than it gives
    shown = as_text(merge_screen(report, "worded"))
    assert "  base plus adapter, unmerged" in shown
    assert "  merged and quantized" in shown
    merged(worded, tmp_path / "floats", tmp_path / "adapter")
    ours, floats = ConvertSource(tmp_path / "out"), ConvertSource(tmp_path / "floats")
    for name in ours.matrices:
        rows = ours.shape(name)[0]
        error = ours.floats(name, 0, rows) - floats.floats(name, 0, rows)
        assert error.norm() < 0.01 * floats.floats(name, 0, rows).norm(), name
    assert not list(tmp_path.glob(".*")), "the merged floats are gone"


def test_a_refused_requantization_leaves_no_output(worded: Path, tmp_path: Path) -> None:
    make_adapter(worded, tmp_path / "adapter", size=0.3)
    gate = GateRequest(max_chunks=2, max_quality_loss=0.0, max_kld=0.0, threads=1)
    request = Requantization(RecipeRequest("rtn", bits=2, group_size=32), device="cpu", gate=gate)
    with pytest.raises(UserError, match="refused"):
        merged(worded, tmp_path / "out", tmp_path / "adapter", requantize=request)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.rejected").is_dir()
    assert not list(tmp_path.glob(".*"))


def test_a_rank_8_merge_is_extracted_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = dense(tmp_path / "base")
    targets = ["q_proj", "v_proj", "down_proj", "gate_proj", "embed_tokens"]
    make_adapter(base, tmp_path / "adapter", r=8, target_modules=targets)
    merged(base, tmp_path / "tuned", tmp_path / "adapter")
    arguments = ["convert", str(tmp_path / "tuned"), str(tmp_path / "out"), "--extract-adapter", str(base)]
    assert main([*arguments, "--rank", "8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["energy"] > 1 - 1e-6
    original, recovered = read_adapter(tmp_path / "adapter"), read_adapter(tmp_path / "out")
    assert original.matrices.keys() == recovered.matrices.keys()
    for name, matrix in original.matrices.items():
        error = (recovered.matrices[name].delta() - matrix.delta()).norm() / matrix.delta().norm()
        assert error < 1e-3, (name, float(error))
    merged(base, tmp_path / "again", tmp_path / "out")
    assert_same_floats(tmp_path / "again", tmp_path / "tuned", 1e-4)


def test_extraction_keeps_the_largest_part_and_says_how_large(tmp_path: Path) -> None:
    base = dense(tmp_path / "base")
    make_adapter(base, tmp_path / "adapter", r=8, modules_to_save=["post_attention_layernorm"])
    merged(base, tmp_path / "tuned", tmp_path / "adapter")
    energies = [extract(tmp_path / "tuned", base, tmp_path / f"rank{rank}", rank).energy for rank in (1, 4, 8)]
    assert 0 < energies[0] < energies[1] < energies[2]
    assert energies[2] > 1 - 1e-6
    report = extract(tmp_path / "tuned", base, tmp_path / "more", 20)  # no more than there is
    assert {module.rank for module in report.modules} == {8}
    assert [name for name in report.left_out if "post_attention_layernorm" in name]


@pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
def test_factors_are_those_of_the_singular_values(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    factors = factorize(matrix, 5)
    torch.testing.assert_close(factors.b @ factors.a, (u[:, :5] * s[:5]) @ v[:5], atol=1e-5, rtol=1e-5)
    assert factors.kept / factors.whole == pytest.approx(float(s[:5].square().sum() / s.square().sum()), rel=1e-5)


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = dense(tmp_path / "base")
    make_adapter(base, tmp_path / "adapter")
    (tmp_path / "other").mkdir()
    make("mistral", tmp_path / "other")
    add_tokenizer(tmp_path / "other")
    out, adapter = tmp_path / "out", tmp_path / "adapter"
    for words, message in (
        ((tmp_path / "other", out, "--adapter", adapter), "does not fit base"),
        ((base, out, "--adapter", tmp_path / "nowhere"), "does not exist"),
        ((base, out, "--adapter", f"{adapter}=inf"), "weight of adapter"),
        ((base, out, "--bits", 4), "--bits is for merged adapters"),
        ((base, out, "--extract-adapter", base, "--rank", 0), "--rank is 0"),
        ((base, out, "--extract-adapter", base), "are equal"),
        ((base, out, "--extract-adapter", tmp_path / "other"), "give the base that the model was tuned from"),
    ):
        capsys.readouterr()
        assert main(["convert", *map(str, words)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.strip().splitlines()) == 2, error
    assert not out.exists()


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = dense(tmp_path / "base")
    make_adapter(base, tmp_path / "adapter")
    assert main(["convert", str(base), str(tmp_path / "out"), "--adapter", f"{tmp_path / 'adapter'}=0.5"]) == 0
    shown = capsys.readouterr().out
    assert "weight 0.5" in shown
    assert "tensors changed" in shown
    words = ["convert", str(tmp_path / "out"), str(tmp_path / "again"), "--extract-adapter", str(base), "--rank", "2"]
    assert main(words) == 0
    assert "of the difference kept" in " ".join(capsys.readouterr().out.split())


def test_weights_are_read_from_the_end(tmp_path: Path) -> None:
    odd = tmp_path / "a=b=0.5"
    odd.mkdir()
    assert parse_adapter(str(odd)) == AdapterChoice(odd)
    assert parse_adapter(f"{odd}=0.7") == AdapterChoice(odd, 0.7)
    assert parse_adapter("adapter") == AdapterChoice(Path("adapter"))
