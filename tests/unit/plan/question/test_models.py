"""Built-in models against their published sizes; configurations of every family; names and their mistakes."""

from __future__ import annotations

import csv
import gzip
import json
import tomllib
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest

from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import CheckpointError, UserError
from tokenmill.hardware.memory import GIB, sequence_bytes
from tokenmill.plan.question.model_names import built_in, built_in_names, describe_for_planning, from_config
from tokenmill.plan.question.planned_model import PlannedModel

TABLE = tomllib.loads((resources.files("tokenmill.plan") / "data" / "models.toml").read_text())["model"]


@pytest.mark.parametrize("name", built_in_names())
def test_parameters_agree_with_the_model_card(name: str) -> None:
    model = built_in(name)
    assert model.parameters == pytest.approx(TABLE[name]["parameters"], rel=0.01)
    if "active" in TABLE[name]:
        assert model.active_parameters == pytest.approx(TABLE[name]["active"], rel=0.08)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("qwen2.5-72b", 327_680), ("llama-3.1-405b", 516_096), ("deepseek-v3", 70_272), ("llama-3.1-8b", 131_072)],
)
def test_kv_bytes_per_token(name: str, expected: int) -> None:
    """F2, with the published 327.68, 516.1 and 70.3 KB."""
    assert built_in(name).kv_bytes_per_token() == expected


def test_kv_under_tensor_parallelism() -> None:
    """Heads are divided until there is one per rank, then replicated; a latent is never divided."""
    llama = built_in("llama-3.1-70b")
    assert [llama.kv_bytes_per_token(tp) for tp in (1, 8, 16)] == [327_680, 40_960, 40_960]
    latent = built_in("deepseek-v3")
    assert latent.kv_bytes_per_token(8) == latent.kv_bytes_per_token(1) == 70_272


def test_hybrid_needs_an_eighth_of_the_cache() -> None:
    """F3: Jamba at 256K tokens holds 4 GB of KV where Mixtral holds 32."""
    jamba = sequence_bytes([need for need in built_in("jamba-v0.1").kv_needs() if need.kind != "state"], 256 * 1024)
    mixtral = sequence_bytes(built_in("mixtral-8x7b").kv_needs(), 256 * 1024)
    assert jamba / GIB == pytest.approx(4.0, rel=0.01)
    assert mixtral / GIB == pytest.approx(32.0, rel=0.01)


def test_sliding_window_share() -> None:
    """F3: five of six layers with a window of 1024 keep 19.3 % of the full cache at 32K."""
    config = {**TABLE["gemma-3-27b"]["config"], "num_hidden_layers": 60}
    model = from_config(config)
    full = from_config({**config, "sliding_window": 0, "sliding_window_pattern": 0})
    share = sequence_bytes(model.kv_needs(), 32768, 1) / sequence_bytes(full.kv_needs(), 32768, 1)
    assert share == pytest.approx(0.193, abs=0.002)


def test_recurrent_state_formula() -> None:
    """F3: Mamba 2 keeps nheads x head_dim x d_state plus the convolution, per layer and sequence, in float32 as the
    engine stores both."""
    (need,) = built_in("mamba2-2.7b").kv_needs()
    assert need.state_bytes == 80 * 64 * 128 * 4 + 3 * (5120 + 2 * 128) * 4
    assert need.layers == 64


def test_latent_against_grouped_query() -> None:
    """C18: the latent cache is about a quarter of a 32B grouped-query model's, half of Llama-3-8B's."""
    latent = built_in("deepseek-v3").kv_bytes_per_token()
    assert latent / built_in("qwen2.5-32b").kv_bytes_per_token() == pytest.approx(0.27, abs=0.02)
    assert latent / built_in("llama-3.1-8b").kv_bytes_per_token() == pytest.approx(0.54, abs=0.02)


def test_seventy_billion_at_8k_is_not_twenty_gigabytes() -> None:
    """C3: grouped queries make 2.5 GiB; 20 GB belongs to 64 KV heads."""
    grouped = sequence_bytes(built_in("llama-3.1-70b").kv_needs(), 8192)
    assert grouped / GIB == pytest.approx(2.5, rel=0.01)
    assert sequence_bytes(built_in("llama-65b").kv_needs(), 8192) / GIB == pytest.approx(20.0, rel=0.01)


def test_mixed_layers_are_told_apart() -> None:
    deepseek = built_in("deepseek-v3")
    assert sorted(kind.count for kind in deepseek.layers) == [3, 58]
    oss = built_in("gpt-oss-120b")
    assert {kind.layer.kind: kind.count for kind in oss.layers} == {"sliding": 18, "full": 18}
    hybrid = built_in("qwen3.5-397b-a17b")
    assert {kind.layer.kind: kind.count for kind in hybrid.layers} == {"recurrent": 45, "full": 15}


def test_names_with_and_without_organisation() -> None:
    for name in ("Qwen/Qwen3-32B", "qwen3-32b", "someone/Qwen3-32B"):
        assert describe_for_planning(name).name == "qwen3-32b"


@pytest.mark.parametrize(
    ("written", "name", "stored"),
    [
        ("DEEPSEEK_V3", "deepseek-v3", "fp8-block"),
        ("QWEN3_235B", "qwen3-235b-a22b", "bf16"),
        ("meta-llama/Meta-Llama-3.1-70B", "llama-3.1-70b", "bf16"),
        ("nvidia/Llama-3.3-70B-Instruct-FP8", "llama-3.1-70b", "fp8"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "qwen3-30b-a3b", "fp8"),
        ("deepseek-ai/DeepSeek-R1-0528-FP4", "deepseek-r1", "nvfp4"),
        ("neuralmagic/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "llama-3.1-8b", "int8"),
        ("MOE_Mixtral8x7B", "mixtral-8x7b", "bf16"),
    ],
)
def test_names_as_tables_write_them(written: str, name: str, stored: str) -> None:
    found = describe_for_planning(written)
    assert (found.name, found.stored_format) == (name, stored)


def test_unknown_model_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"nearest: llama-3\.1-70b"):
        describe_for_planning("llama-3.1-70")


def test_every_measured_model_is_known(data_path: Path) -> None:
    with gzip.open(data_path / "profiles" / "silicon_dev.csv.gz", "rt") as file:
        names = {row["model_path"] for row in csv.DictReader(file)}
    for name in names:
        assert describe_for_planning(name).parameters > 1e9


@pytest.mark.parametrize("alias", ["smollm2", "gemma3-270m", "stories15m"])
def test_files_agree_with_the_engine(alias: str, model_path: Callable[[str], Path]) -> None:
    """From metadata alone the planner sees the same sizes as the engine's description of the file."""
    path = model_path(alias)
    planned = describe_for_planning(path)
    from_engine = PlannedModel(open_checkpoint(path).description, "from the engine")
    assert planned.parameters == from_engine.parameters
    assert sequence_bytes(planned.kv_needs(), 1000) == sequence_bytes(from_engine.kv_needs(), 1000)
    assert planned.stored_bytes > 0


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4-g128"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8}}}}, "int8"),
    ],
)
def test_stored_format_of_a_config(tmp_path: Path, quantization: dict[str, object], expected: str) -> None:
    config = {**TABLE["llama-3.1-8b"]["config"], "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert describe_for_planning(tmp_path).stored_format == expected


@pytest.mark.parametrize("change", [{"hidden_size": None}, {"hidden_size": "big"}, {"num_hidden_layers": -3}])
def test_a_broken_config_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TABLE["llama-3.1-8b"]["config"], **change}))
    with pytest.raises(CheckpointError, match=r"hidden_size|num_hidden_layers"):
        describe_for_planning(tmp_path / "config.json")
