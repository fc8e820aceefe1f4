"""What a file format cannot hold it refuses beforehand, with what to do instead; what it writes, peers' configs say."""

from __future__ import annotations

import pytest

from tokenmill.errors import UserError
from tokenmill.model.formats.files import FILE_FORMATS
from tokenmill.model.formats.quantized import Scheme

SHAPE = (64, 96)


@pytest.mark.parametrize(
    ("file_format", "scheme", "shape", "reason"),
    [
        ("gptq", Scheme("int", 4, 32, symmetric=False), SHAPE, "gptq_v2"),
        ("gptq", Scheme("int", 5, 32), SHAPE, "compressed-tensors"),
        ("gptq", Scheme("int", 3, 32), (50, 96), "do not fill words"),
        ("gptq", Scheme("e4m3", 8), SHAPE, "integers"),
        ("gptq_v2", Scheme("int", 8, activations="int8_token"), SHAPE, "activations"),
        ("awq", Scheme("int", 3, 32), SHAPE, "4 bits"),
        ("awq", Scheme("int", 4, 32), (60, 96), "multiple of 8"),
        ("awq", Scheme("int", 4, 64), SHAPE, "--group-size"),
        ("bitsandbytes", Scheme("int", 4, 32), SHAPE, "compressed-tensors"),
        ("bitsandbytes", Scheme("nf4", 4, 48), SHAPE, "--group-size 64"),
        ("bitsandbytes", Scheme("int", 8, activations="int8_token"), SHAPE, "llm_int8"),
        ("bitsandbytes_double", Scheme("int", 8, activations="llm_int8"), SHAPE, "nf4"),
        ("fp8", Scheme("e4m3", 8, activations="fp8_token"), SHAPE, "per row"),
        ("fp8", Scheme("e4m3", 8, 128, 128), SHAPE, "fp8_group128"),
        ("compressed-tensors", Scheme("nf4", 4, 32), SHAPE, "bitsandbytes"),
        ("compressed-tensors", Scheme("int", 4, 64), SHAPE, "--group-size"),
        ("compressed-tensors", Scheme("int", 8, 32, activations="int8_token"), SHAPE, "--group-size 0"),
        ("compressed-tensors", Scheme("int", 8, 0, 0), SHAPE, "per row"),
        ("compressed-tensors", Scheme("e2m1", 4, 32, scale_type="e4m3"), SHAPE, "groups of 16"),
    ],
)
def test_refusals_name_the_remedy(file_format: str, scheme: Scheme, shape: tuple[int, int], reason: str) -> None:
    writer = FILE_FORMATS.get(file_format)
    found = writer.refuses(scheme, shape)
    assert found is not None
    assert reason in found
    with pytest.raises(UserError, match="cannot hold q_proj") as caught:
        writer.check({"q_proj": scheme}, {"q_proj": shape})
    assert caught.value.remedy


def test_a_mix_of_schemes() -> None:
    schemes = {"a": Scheme("int", 4, 32), "b": Scheme("int", 4)}
    shapes = dict.fromkeys(schemes, SHAPE)
    with pytest.raises(UserError, match="mix of schemes"):
        FILE_FORMATS.get("awq").check(schemes, shapes)
    for name in ("compressed-tensors", "gptq"):
        FILE_FORMATS.get(name).check(schemes, shapes)
    groups = FILE_FORMATS.get("compressed-tensors").quantization_config(schemes, [])["config_groups"]
    assert [group["targets"] for group in groups.values()] == [["a"], ["b"]]
    dynamic = FILE_FORMATS.get("gptq").quantization_config({**schemes, "c": schemes["a"]}, ["x.gate", "lm_head"])[
        "dynamic"
    ]
    assert dynamic == {"+:^b$": {"bits": 4, "group_size": -1, "sym": True}, "-:^x\\.gate$": {}}


def test_configs_have_what_loaders_ask_for() -> None:
    four = Scheme("int", 4, 128, symmetric=False)
    awq = FILE_FORMATS.get("awq").quantization_config({"a": four}, ["lm_head"])
    assert (awq["bits"], awq["group_size"], awq["zero_point"], awq["version"]) == (4, 128, True, "gemm")
    gptq = FILE_FORMATS.get("gptq_v2").quantization_config({"a": four}, ["lm_head"])
    assert (gptq["bits"], gptq["group_size"], gptq["sym"], gptq["desc_act"]) == (4, 128, False, False)
    assert gptq["checkpoint_format"] == "gptq_v2"
    ours = FILE_FORMATS.get("compressed-tensors").quantization_config({"a": four}, ["lm_head"])
    assert (ours["format"], ours["ignore"], ours["quantization_status"]) == (
        "pack-quantized",
        ["lm_head"],
        "compressed",
    )
    group = ours["config_groups"]["group_0"]
    assert group["targets"] == ["Linear"]
    assert group["weights"]["strategy"] == "group"
    assert group["weights"]["symmetric"] is False
    block = Scheme("e4m3", 8, 128, 128, activations="fp8_group128")
    deepseek = FILE_FORMATS.get("fp8").quantization_config({"a": block}, [])
    assert (deepseek["weight_block_size"], deepseek["activation_scheme"]) == ([128, 128], "dynamic")
