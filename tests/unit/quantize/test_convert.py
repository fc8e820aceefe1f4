"""Conversions: where the bits allow, both files mean exactly the same; where not, the loss is named or refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.parity.engine_logits import engine_logits
from tests.parity.tiny_models import make
from tests.quantized_files import random_matrix, save_quantized
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.cli.main import main
from tokenmill.errors import UserError
from tokenmill.kernels.ref_ggml import dequantize
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.convert import ConvertReport, convert
from tokenmill.quantize.convert_source import ConvertSource
from tokenmill.quantize.ggml.codes import decode_blocks, encode_blocks, scheme_of, type_for
from tokenmill.quantize.ggml.export import quantize_gguf

SYMMETRIC, ASYMMETRIC = Scheme("int", 4, 32), Scheme("int", 4, 32, symmetric=False)
IDS = [3, 17, 101, 64, 9, 30, 77, 5]


def add_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:120]
    backend = Tokenizer(models.BPE({piece: place for place, piece in enumerate([*alphabet, "th"])}, [("t", "h")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))


def dense(folder: Path, name: str = "llama") -> Path:
    folder.mkdir()
    make(name, folder)
    if name == "gemma3":  # a GGUF takes the query's scale from the head size
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "query_pre_attn_scalar": config["head_dim"]}))
    add_tokenizer(folder)
    return folder


def quantized(folder: Path, file_format: str, scheme: Scheme, name: str = "llama") -> Path:
    """A tiny model; its scales are shortened to what a half holds, as real files have them."""
    folder.mkdir()
    save_quantized(folder, file_format, scheme, name)
    add_tokenizer(folder)
    tensors = load_file(folder / "model.safetensors")
    scales = {key: value.half() for key, value in tensors.items() if key.endswith(("scales", "weight_scale"))}
    if scheme.element == "int":
        save_file({**tensors, **scales}, folder / "model.safetensors")
    return folder


def assert_same_numbers(a: Path, b: Path) -> None:
    first, second = ConvertSource(a), ConvertSource(b)
    assert first.matrices == second.matrices
    for prefix in first.matrices:
        rows = first.shape(prefix)[0]
        assert torch.equal(first.floats(prefix, 0, rows), second.floats(prefix, 0, rows)), prefix
    for name in first.vectors:
        assert torch.equal(first.as_used(name), second.as_used(name)), name


def there_and_back(tmp_path: Path, source: Path, start: str, via: str) -> tuple[ConvertReport, ConvertReport]:
    suffix = ".gguf" if via == "gguf" else ""
    there = convert(source, tmp_path / f"there{suffix}", via)
    back = convert(tmp_path / f"there{suffix}", tmp_path / "back", start)
    return there, back


@pytest.mark.parametrize(
    ("start", "via", "scheme"),
    [
        ("awq", "gptq_v2", ASYMMETRIC),
        ("awq", "compressed-tensors", ASYMMETRIC),
        ("gptq_v2", "compressed-tensors", Scheme("int", 3, 32, symmetric=False)),
        ("gptq", "compressed-tensors", SYMMETRIC),
        ("gptq", "awq", SYMMETRIC),
        ("gptq", "compressed-tensors", Scheme("int", 8, 0)),
        ("compressed-tensors", "gguf", SYMMETRIC),
        ("compressed-tensors", "gguf", Scheme("int", 8, 32)),
        ("compressed-tensors", "gguf", Scheme("e2m1", 4, 32, scale_type="e8m0")),
    ],
)
def test_there_and_back_without_loss(start: str, via: str, scheme: Scheme, tmp_path: Path) -> None:
    source = quantized(tmp_path / "source", start, scheme)
    there, back = there_and_back(tmp_path, source, start, via)
    assert there.lossless, there.lost
    assert back.lossless, back.lost
    assert_same_numbers(source, tmp_path / "back")
    ours, again = load_file(source / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    for key, value in ours.items():
        if "_proj" in key and not key.endswith("g_idx"):
            assert torch.equal(value.view(torch.uint8), again[key].view(torch.uint8)), key


def test_the_engine_runs_what_was_converted(tmp_path: Path) -> None:
    source = quantized(tmp_path / "source", "awq", ASYMMETRIC, "qwen2")
    convert(source, tmp_path / "out", "compressed-tensors")
    expected = engine_logits(source, IDS, "eager")
    torch.testing.assert_close(engine_logits(tmp_path / "out", IDS, "eager"), expected)


def test_larger_groups_repeat_their_scale_in_a_gguf(tmp_path: Path) -> None:
    source = quantized(tmp_path / "source", "gptq", Scheme("int", 4, 0))
    report = convert(source, tmp_path / "out.gguf", "gguf")
    assert report.lossless
    assert report.types["INT4_CHANNEL to Q4_0"] == 21
    assert_same_numbers(source, tmp_path / "out.gguf")
    torch.testing.assert_close(
        engine_logits(tmp_path / "out.gguf", IDS, "eager"), engine_logits(source, IDS, "eager"), rtol=1e-4, atol=1e-4
    )


def test_offsets_of_an_asymmetric_gguf_are_rounded_and_said(tmp_path: Path) -> None:
    source = quantized(tmp_path / "source", "awq", ASYMMETRIC)
    report = convert(source, tmp_path / "out.gguf", "gguf")
    assert not report.lossless
    assert len(report.lost) == 21
    assert all("offsets" in loss.lost[0] for loss in report.lost)


def test_scales_that_a_half_does_not_hold_are_a_loss(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    save_quantized(folder, "compressed-tensors", SYMMETRIC)  # float32 scales
    add_tokenizer(folder)
    assert not convert(folder, tmp_path / "a", "awq").lossless
    assert "float16" in convert(folder, tmp_path / "b", "gptq").lost[0].lost[0]
    assert convert(folder, tmp_path / "c", "safetensors").lossless


def test_rounded_inputs_are_a_loss_where_the_format_cannot_say_them(tmp_path: Path) -> None:
    source = quantized(tmp_path / "source", "compressed-tensors", Scheme("int", 8, 0, activations="int8_token"))
    report = convert(source, tmp_path / "out", "gptq")
    assert not report.lossless
    assert {loss.lost for loss in report.lost} == {("its input is no longer rounded (int8_token)",)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "llama-llama3"])
def test_dense_to_gguf_and_back(name: str, dtype: str, tmp_path: Path) -> None:
    source = dense(tmp_path / "source", name)
    if dtype == "bfloat16":
        tensors = load_file(source / "model.safetensors")
        save_file({key: value.bfloat16() for key, value in tensors.items()}, source / "model.safetensors")
    report = convert(source, tmp_path / "there.gguf", "gguf")
    assert report.lossless
    assert set(report.types) == {"F32 to F32"} if dtype == "float32" else {"BF16 to BF16"}
    assert convert(tmp_path / "there.gguf", tmp_path / "back", "safetensors").lossless
    assert_same_numbers(source, tmp_path / "back")
    expected = engine_logits(source, IDS, "eager")
    for path in (tmp_path / "there.gguf", tmp_path / "back"):
        torch.testing.assert_close(engine_logits(path, IDS, "eager"), expected, rtol=1e-4, atol=1e-4)


def test_a_float_type_that_is_too_narrow_is_a_loss(tmp_path: Path) -> None:
    source = dense(tmp_path / "source")
    report = convert(source, tmp_path / "out.gguf", "gguf", "float16")
    assert not report.lossless
    assert "F16" in report.lost[0].lost[0]
    assert 0 < float(report.lost[0].lost[0].split("up to ")[1].split()[0]) < 2**-11


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_a_quantized_gguf_becomes_floats(name: str, tmp_path: Path) -> None:
    source = dense(tmp_path / "source", name)
    quantize_gguf(open_checkpoint(source), tmp_path / "model.gguf", "Q8_0")
    report = convert(tmp_path / "model.gguf", tmp_path / "out", "safetensors")
    assert report.lossless
    expected = engine_logits(tmp_path / "model.gguf", IDS, "eager")
    torch.testing.assert_close(engine_logits(tmp_path / "out", IDS, "eager"), expected, rtol=1e-4, atol=1e-4)
    narrow = convert(tmp_path / "model.gguf", tmp_path / "narrow", "safetensors", "bfloat16")
    assert any("BF16" in loss.lost[0] for loss in narrow.lost)


def test_blocks_without_a_scheme_are_refused(tmp_path: Path) -> None:
    source = dense(tmp_path / "source")
    quantize_gguf(open_checkpoint(source), tmp_path / "model.gguf", "Q4_1")
    with pytest.raises(UserError, match=r"Q4_1.*tokenmill quantize"):
        convert(tmp_path / "model.gguf", tmp_path / "out", "compressed-tensors")
    with pytest.raises(UserError, match="already"):
        convert(tmp_path / "model.gguf", tmp_path / "out.gguf", "gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "source"]


class TestRefusals:
    def test_dense_would_have_to_be_quantized(self, tmp_path: Path) -> None:
        make("llama", tmp_path)
        with pytest.raises(UserError, match="tokenmill quantize"):
            convert(tmp_path, tmp_path.with_name("out"), "awq")
        with pytest.raises(UserError, match="already"):
            convert(tmp_path, tmp_path.with_name("out"), "safetensors")

    def test_codes_that_fit_nothing(self, tmp_path: Path) -> None:
        source = quantized(tmp_path / "source", "compressed-tensors", Scheme("e2m1", 4, 16, scale_type="e4m3"))
        with pytest.raises(UserError, match=r"NVFP4.*quantize"):
            convert(source, tmp_path / "out.gguf", "gguf")
        with pytest.raises(UserError, match=r"integers.*tokenmill quantize"):
            convert(source, tmp_path / "out", "gptq")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]

    def test_asymmetric_in_version_1(self, tmp_path: Path) -> None:
        source = quantized(tmp_path / "source", "awq", ASYMMETRIC)
        with pytest.raises(UserError, match="gptq_v2"):
            convert(source, tmp_path / "out", "gptq")

    def test_names_and_paths(self, tmp_path: Path) -> None:
        source = quantized(tmp_path / "source", "awq", ASYMMETRIC)
        with pytest.raises(UserError, match="compressed-tensors"):
            convert(source, tmp_path / "out", "compresed-tensors")
        with pytest.raises(UserError, match="exists"):
            convert(source, source, "gptq_v2")
        with pytest.raises(UserError, match="not a directory"):
            convert(source, tmp_path / "none" / "out", "gptq_v2")
        with pytest.raises(UserError, match="bfloat16"):
            convert(source, tmp_path / "out", "gptq_v2", "bf16")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = quantized(tmp_path / "source", "awq", ASYMMETRIC)
    capsys.readouterr()
    assert main(["convert", str(source), str(tmp_path / "out"), "--format", "gptq_v2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["path"], report["lossless"], report["lost"]) == (str(tmp_path / "out"), True, [])
    assert main(["convert", str(source), str(tmp_path / "out.gguf"), "--json"]) == 0  # by its name a GGUF
    report = json.loads(capsys.readouterr().out)
    assert not report["lossless"]
    assert set(report["lost"][0]) == {"name", "lost"}
    assert main(["convert", str(source), str(tmp_path / "out"), "--format", "awq"]) == 2


def test_config_keeps_what_it_said(tmp_path: Path) -> None:
    source = quantized(tmp_path / "source", "awq", ASYMMETRIC)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "own_key": 7}))
    convert(source, tmp_path / "out", "compressed-tensors")
    result = json.loads((tmp_path / "out" / "config.json").read_text())
    assert result["own_key"] == 7
    assert result["quantization_config"]["quant_method"] == "compressed-tensors"
    assert result["quantization_config"]["ignore"] == ["lm_head"]


@pytest.mark.parametrize(
    ("scheme", "type_name"),
    [
        (Scheme("int", 2, 64), "Q4_0"),
        (Scheme("int", 4, 32), "Q4_0"),
        (Scheme("int", 5, 0), "Q5_0"),
        (Scheme("int", 6, 96), "Q8_0"),
        (Scheme("int", 8, 32), "Q8_0"),
        (Scheme("int", 3, 32, symmetric=False), "Q4_1"),
        (Scheme("int", 5, 32, symmetric=False), "Q5_1"),
        (Scheme("e2m1", 4, 32, scale_type="e8m0"), "MXFP4"),
        (Scheme("int", 8, 32, symmetric=False), None),
        (Scheme("int", 4, 48), None),
        (Scheme("e4m3", 8), None),
    ],
)
def test_codes_become_blocks(scheme: Scheme, type_name: str | None) -> None:
    assert type_for(scheme, 192) == type_name
    if type_name is None:
        return
    matrix = random_matrix(scheme, 8, 192)
    blocks = encode_blocks(type_name, matrix)
    tolerance = 0 if scheme.symmetric else 4e-3  # offsets are rounded to float16
    torch.testing.assert_close(dequantize(type_name, blocks), matrix.dequantize(), rtol=tolerance, atol=tolerance / 10)
    if scheme_of(type_name) is not None:
        assert torch.equal(decode_blocks(type_name, blocks).dequantize(), matrix.dequantize())


def test_blocks_of_llama_cpp_become_codes() -> None:
    """Scales of Q4_0 may be negative: codes and values stay what they are."""
    import gguf

    values = np.random.default_rng(0).standard_normal((6, 128)).astype(np.float32)
    for type_name in ("Q4_0", "Q5_0", "Q8_0", "MXFP4"):
        kind = gguf.GGMLQuantizationType[type_name]
        data = gguf.quants.quantize(values, kind)
        matrix = decode_blocks(type_name, torch.from_numpy(data))
        assert np.array_equal(matrix.dequantize().numpy(), gguf.quants.dequantize(data, kind)), type_name
        assert torch.equal(encode_blocks(type_name, matrix), torch.from_numpy(data)), type_name
