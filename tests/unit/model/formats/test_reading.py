"""Files as peers and older tools wrote them: what tensors alone do not say is taken from the config, and nothing that
would change the result is ignored."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parity.engine_logits import engine_logits
from tests.quantized_files import SAMPLES, MemoryCheckpoint, in_memory, random_matrix, save_quantized, save_tensors
from tokenmill.errors import CheckpointError
from tokenmill.kernels.base import select_linear
from tokenmill.model.formats import FORMATS
from tokenmill.model.formats.bits import pack_bits
from tokenmill.model.formats.coded import CodedWeight
from tokenmill.model.formats.files import FILE_FORMATS
from tokenmill.model.formats.gptq import GptqWeight
from tokenmill.model.formats.quantized import Scheme

PREFIX = "model.q_proj"


def load(tensors: dict[str, Tensor], config: dict[str, object] | None = None) -> CodedWeight:
    checkpoint = MemoryCheckpoint({f"{PREFIX}.{suffix}": part for suffix, part in tensors.items()}, config)
    for name in FORMATS:
        if FORMATS.get(name).tensor_names(checkpoint, PREFIX):
            weight: CodedWeight = FORMATS.get(name).load(checkpoint, PREFIX)
            return weight
    raise AssertionError("no format took it")


def gptq(scheme: Scheme, version: int = 2) -> tuple[dict[str, Tensor], Tensor]:
    matrix = random_matrix(scheme, 32, 64)
    return FILE_FORMATS.get("gptq_v2" if version == 2 else "gptq").encode(matrix), matrix.dequantize()


def test_gptq_columns_in_activation_order() -> None:
    tensors, _ = gptq(Scheme("int", 4, 32, symmetric=False))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    tensors["g_idx"] = (order // 32).int()
    weight = load(tensors, {"checkpoint_format": "gptq_v2", "group_size": 32})
    codes = load({**tensors, "g_idx": (torch.arange(64) // 32).int()}, {"checkpoint_format": "gptq_v2"}).decode()
    assert codes.zeros is not None
    groups = tensors["g_idx"].long()
    expected = codes.scales[:, groups] * (codes.codes - codes.zeros[:, groups])
    assert torch.equal(weight.dequantize(0, 32), expected)
    with pytest.raises(CheckpointError, match="activation order"):
        weight.decode()
    assert select_linear(weight, torch.device("cpu")).backend == "ref"


def test_gptq_version_1_borrows_between_fields() -> None:
    """A zero point of 0 is stored as -1 and takes from its neighbour; the sum of the words is right all the same."""
    tensors, values = gptq(Scheme("int", 4, 32, symmetric=False))
    tensors["qzeros"] = (tensors["qzeros"].long() - 0x11111111).to(torch.int32)
    assert torch.equal(load(tensors, {"checkpoint_format": "gptq", "sym": False}).dequantize(0, 32), values)


def test_gptq_that_says_symmetric_is_symmetric_whatever_its_zero_points() -> None:
    tensors, values = gptq(Scheme("int", 4, 32))
    weight = load(tensors, {"sym": True})  # version 2 zero points in a file that does not say so
    assert weight.scheme.symmetric
    assert torch.equal(weight.dequantize(0, 32), values)


def test_gptq_bits_follow_from_the_shapes() -> None:
    for bits in (2, 3, 4, 8):
        tensors, values = gptq(Scheme("int", bits, 32), 1)
        weight = load(tensors)
        assert (weight.type_name, weight.in_features) == (f"INT{bits}_G32", 64)
        assert torch.equal(weight.dequantize(0, 32), values)


def test_padded_words_of_older_compressed_tensors() -> None:
    matrix = random_matrix(Scheme("int", 3, 32, symmetric=False), 10, 64)
    tensors = FILE_FORMATS.get("compressed-tensors").encode(matrix)

    def padded(codes: Tensor) -> Tensor:  # 10 of 3 bits to a word
        wide = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % 10)).view(codes.shape[0], -1, 10)
        return (wide << (3 * torch.arange(10))).sum(-1).to(torch.int32)

    assert matrix.zeros is not None
    tensors["weight_packed"] = padded(matrix.codes)
    tensors["weight_zero_point"] = padded(matrix.zeros.T).T.contiguous()
    config = FILE_FORMATS.get("compressed-tensors").quantization_config({PREFIX: matrix.scheme}, [])
    assert torch.equal(load(tensors, config).dequantize(0, 10), matrix.dequantize())


def test_modelopt_nvfp4_multiplies_by_its_second_scale() -> None:
    matrix = random_matrix(Scheme("e2m1", 4, 16, scale_type="e4m3", activations="nvfp4"), 6, 64)
    tensors = FILE_FORMATS.get("compressed-tensors").encode(matrix)
    theirs = {
        "weight": tensors["weight_packed"],
        "weight_scale": tensors["weight_scale"],
        "weight_scale_2": 1 / tensors["weight_global_scale"][0],
        "input_scale": torch.tensor(0.0625),
    }
    weight = load(theirs, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    assert torch.equal(weight.dequantize(0, 6), matrix.dequantize())
    assert (weight.activations, weight.input_scale) == ("nvfp4", 0.0625)
    with pytest.raises(CheckpointError, match="no input scale"):
        load({key: value for key, value in theirs.items() if key != "input_scale"}, {"quant_algo": "NVFP4"})


def test_block_scales_as_exponents() -> None:
    matrix = random_matrix(Scheme("e4m3", 8, 128, 128, scale_type="e8m0", activations="fp8_group128"), 130, 256)
    exponents = (matrix.scales.log2() + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    tensors = {"weight": matrix.codes.view(torch.float8_e4m3fn), "weight_scale_inv": exponents}
    weight = load(tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert (weight.type_name, weight.scheme) == ("FP8_BLOCK", matrix.scheme)
    assert torch.equal(weight.dequantize(100, 130), matrix.dequantize()[100:])


def test_nf4_blocks_that_cross_rows() -> None:
    """Blocks of 64 over rows of 96: every third group of 32 begins a block anew."""
    matrix = random_matrix(Scheme("nf4", 4, 32), 4, 96)
    tensors = FILE_FORMATS.get("bitsandbytes").encode(matrix)
    peaks = torch.rand(6) + 0.1
    tensors["weight.absmax"] = peaks
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [4, 96]}
    name = "weight.quant_state.bitsandbytes__nf4"
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    weight = load(tensors)
    expected = tensors["weight.quant_map"][matrix.codes.long()].view(6, 64) * peaks.unsqueeze(1)
    assert torch.equal(weight.dequantize(0, 4), expected.view(4, 96))
    assert torch.equal(weight.dequantize(1, 3), expected.view(4, 96)[1:3])


@pytest.mark.parametrize(
    "inputs",
    [
        {"num_bits": 4, "type": "int", "strategy": "token", "dynamic": True},
        {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": False},
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 64, "dynamic": True},
    ],
)
def test_activations_that_we_do_not_round_so_are_refused(inputs: dict[str, object]) -> None:
    checkpoint = in_memory(random_matrix(Scheme("int", 4, 32), 8, 64), "compressed-tensors", PREFIX)
    config = checkpoint.quantization()
    config["config_groups"]["group_0"]["input_activations"] = inputs  # type: ignore[index]
    with pytest.raises(CheckpointError, match="not what tokenmill runs"):
        FORMATS.get("pack-quantized").load(checkpoint, PREFIX)


def test_targets_by_name_and_pattern_come_before_the_class() -> None:
    matrix = random_matrix(Scheme("int", 4, 32), 8, 64)
    tensors = FILE_FORMATS.get("compressed-tensors").encode(matrix)
    rounded = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    weights = {"num_bits": 4, "group_size": 32}
    groups: dict[str, object] = {
        "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None},
        "group_1": {"targets": ["re:.*q_proj$"], "weights": weights, "input_activations": rounded},
    }
    assert load(tensors, {"config_groups": groups}).activations == "int8_token"
    groups["group_1"] = {"targets": ["model.k_proj"], "weights": weights, "input_activations": rounded}
    assert load(tensors, {"config_groups": groups}).activations == "none"


def test_tensors_that_disagree_are_refused() -> None:
    tensors = FILE_FORMATS.get("compressed-tensors").encode(random_matrix(Scheme("int", 4, 32), 8, 64))
    with pytest.raises(CheckpointError, match="disagree"):
        load({**tensors, "weight_shape": torch.tensor([9, 64])})
    with pytest.raises(CheckpointError, match="words a row"):
        load({**tensors, "weight_shape": torch.tensor([8, 640])})
    with pytest.raises(CheckpointError, match="do not fit"):
        GptqWeight(
            {
                "qweight": pack_bits(torch.zeros(32, 8, dtype=torch.uint8), 4).T,
                "qzeros": torch.zeros(2, 7, dtype=torch.int32),
                "scales": torch.ones(2, 32),
            },
            PREFIX,
        )


def test_a_model_with_settings_beside_its_config_and_added_biases(tmp_path: Path) -> None:
    """AutoGPTQ's way: quantize_config.json, and a bias for every linear."""
    save_quantized(tmp_path, "gptq", Scheme("int", 4, 32))
    expected = engine_logits(tmp_path, [5, 9, 77], "eager")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(engine_logits(tmp_path, [5, 9, 77], "eager"), expected)

    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "model.safetensors")
    scales = {key: part for key, part in tensors.items() if key.endswith(".scales")}
    biases = {key.replace(".scales", ".bias"): torch.zeros(part.shape[1]) for key, part in scales.items()}
    save_tensors(tmp_path, {**tensors, **biases}, {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(engine_logits(tmp_path, [5, 9, 77], "eager"), expected)
    one = next(iter(biases))
    save_tensors(tmp_path, {**tensors, **biases, one: torch.ones_like(biases[one])}, {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not torch.equal(engine_logits(tmp_path, [5, 9, 77], "eager"), expected)


@pytest.mark.parametrize("sample", SAMPLES)
def test_damaged_tensors_are_refused_by_name(sample: str) -> None:
    """Any tensor cut short or of another shape is read, not taken as this format, or refused; nothing else happens."""
    file_format, scheme = SAMPLES[sample]
    checkpoint = in_memory(random_matrix(scheme, 160, 192), file_format, PREFIX)
    whole = {name: checkpoint.tensor(name).data for name in checkpoint.names()}
    for name, data in whole.items():
        for broken in (data.flatten()[: data.numel() // 2], data.flatten()[:0], data.unsqueeze(0)):
            if broken.numel() == data.numel() == 1:
                continue
            damaged = MemoryCheckpoint({**whole, name: broken}, checkpoint.quantization())
            for taker in FORMATS:
                if FORMATS.get(taker).tensor_names(damaged, PREFIX) and taker != "dense":
                    with suppress(CheckpointError):
                        FORMATS.get(taker).load(damaged, PREFIX).dequantize(0, 160)
