"""Made-up weights are in the format that config.json states; what cannot be made up is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu_shapes import SHAPES, shortened, write
from benchmarks.gpu_vs_vllm import packed_config
from tests.gpu.models import write_config
from tokenmill.checkpoint.dummy import DummyCheckpoint
from tokenmill.errors import UserError
from tokenmill.model.architectures import architecture_of
from tokenmill.model.dummy_reader import DummyReader, fill
from tokenmill.model.formats.packed_int import PackedIntWeight


def _types(folder: Path) -> dict[str, str]:
    checkpoint = DummyCheckpoint(folder)
    reader = DummyReader(checkpoint, torch.device("meta"))
    architecture_of(checkpoint.description)(reader, checkpoint.description, 8)
    return {name: weight.type_name for name, weight in reader.weights.items()}


def test_experts_alone_are_mxfp4(tmp_path: Path) -> None:
    types = _types(write_config(tmp_path, "gpt_oss"))
    assert {name: kind for name, kind in types.items() if ".experts." in name and kind != "MXFP4"} == {}
    assert {kind for name, kind in types.items() if ".experts." not in name} == {"BF16"}


def test_all_but_routers_and_the_head_are_float8_in_blocks(tmp_path: Path) -> None:
    types = _types(write_config(tmp_path, "qwen3_fp8"))
    plain = {name.rpartition(".")[2] for name, kind in types.items() if kind == "BF16"}
    assert plain == {"embed_tokens", "lm_head", "gate"}
    assert set(types.values()) == {"BF16", "FP8_BLOCK"}


def test_packed_integers_round_their_input(tmp_path: Path) -> None:
    folder = write_config(tmp_path, quantization_config=packed_config(32))
    assert set(_types(folder).values()) == {"BF16", "INT4_G32"}
    checkpoint = DummyCheckpoint(folder)
    reader = DummyReader(checkpoint, torch.device("cpu"))
    weight = reader.linear("model.layers.0.mlp.down_proj", 64, 96)
    assert isinstance(weight, PackedIntWeight)
    assert weight.activations == "fp8_token"
    matrix = weight.decode()
    assert matrix.codes.unique().tolist() == list(range(16))
    assert (matrix.scales > 0).all()
    (tmp_path / "floats").mkdir()
    other = packed_config(32) | {"format": "float-quantized"}
    with pytest.raises(UserError, match="as float-quantized"):
        DummyCheckpoint(write_config(tmp_path / "floats", quantization_config=other))


def test_other_methods_are_refused(tmp_path: Path) -> None:
    folder = write_config(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(UserError, match="awq"):
        DummyCheckpoint(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8, torch.int32])
def test_random_values_are_finite_and_differ(dtype: torch.dtype) -> None:
    values = fill(torch.empty(64, 64, dtype=dtype, device="meta"), torch.device("cpu"))
    assert values.dtype == dtype
    assert values.float().isfinite().all()
    assert values.float().unique().numel() > 3


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_every_shape_of_the_benchmark_is_read(tmp_path: Path, name: str) -> None:
    assert _types(write(name, tmp_path, layers=2))
    kinds = SHAPES[name].get("layer_types", [])
    assert set(shortened(SHAPES[name], 2).get("layer_types", [])) == set(kinds)
