"""Models that cannot be run: `tokenmill run` names the key or tensor in one line with a remedy, and exits with 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.parity.tiny_models import make, write_tokenizer
from tests.unit.checkpoint import gguf_builder
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.cli.main import main
from tokenmill.model.loader import load_model

_LEFT_OUT = object()
_RUN = ("--token-ids", "1,5,9", "--max-tokens", "1", "--context", "64", "--concurrency", "2", "--json")
_EXPERTS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model, made once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            make(name, made[name])
            write_tokenizer(made[name])
        return made[name]

    return folder


def _copy(source: Path, target: Path) -> Path:
    for path in source.iterdir():
        (target / path.name).symlink_to(path)
    return target


def _with_config(folder: Path, changes: dict[str, Any]) -> Path:
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.unlink()
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not _LEFT_OUT}))
    return folder


def _refusal(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The message of `tokenmill run`, which must be one line and a remedy."""
    capsys.readouterr()
    code = main(["run", str(path), *_RUN, *options])
    printed = capsys.readouterr()
    assert code == 2, printed.err
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert len(lines) == 2, printed.err
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("try: ")
    assert len(lines[1]) > len("try: ")
    return lines[0]


def test_what_is_not_changed_runs(model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(model("deepseek_v3")), *_RUN]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 1


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        # Routers
        ("deepseek_v3", {"topk_method": "lottery"}, ["'lottery'", "'topk_method'"]),
        ("deepseek_v3", {"scoring_func": "tanh"}, ["'tanh'", "'scoring_func'"]),
        ("qwen3_moe", {"scoring_func": "tanh"}, ["'tanh'", "'scoring_func'"]),
        ("qwen3_moe", {"num_experts_per_tok": 9}, ["'num_experts_per_tok' is 9 of 8"]),
        ("qwen3_moe", {"num_experts_per_tok": 0}, ["'num_experts_per_tok' is 0"]),
        ("deepseek_v3", {"n_group": 3}, ["8 experts", "'n_group' = 3"]),
        ("deepseek_v3", {"topk_group": 5}, ["'n_group' = 4", "'topk_group' = 5"]),
        ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 4}, ["'topk_group' = 1", "'num_experts_per_tok'"]),
        # Heads
        ("llama", {"num_key_value_heads": 3}, ["'num_attention_heads' is 4", "3 ('num_key_value_heads')"]),
        ("llama", {"hidden_size": 66, "head_dim": _LEFT_OUT}, ["'hidden_size' is 66", "4 ('num_attention_heads')"]),
        ("llama", {"head_dim": 15}, ["'head_dim' is 15"]),
        # Latent attention
        ("deepseek_v3", {"kv_lora_rank": _LEFT_OUT}, ["'kv_lora_rank' is missing"]),
        ("deepseek_v3", {"kv_lora_rank": 0}, ["'kv_lora_rank' is 0"]),
        ("deepseek_v3", {"v_head_dim": _LEFT_OUT}, ["'v_head_dim' is missing"]),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, ["'qk_rope_head_dim' is 7"]),
        ("deepseek_v3", {"kv_lora_rank": 16}, ["model.layers.0.self_attn.kv_a_proj_with_mqa is [40, 64]"]),
        # States
        ("mamba2", {"n_groups": 3}, ["'num_heads' is 8", "3 ('n_groups')"]),
        ("mamba2", {"num_heads": 7}, ["'num_heads' is 7", "128 channels"]),
        ("bamba", {"mamba_n_groups": 3}, ["'mamba_n_heads' is 8", "3 ('mamba_n_groups')"]),
        ("mamba", {"state_size": -1}, ["'state_size' is -1"]),
        ("qwen3_next", {"linear_num_key_heads": 3}, ["'linear_num_value_heads' is 4", "3 key heads"]),
        # Lists of layers
        ("gemma3", {"layer_types": ["full_attention"]}, ["'layer_types' lists 1 ", "'num_hidden_layers' is 8"]),
        ("qwen3_next", {"layer_types": ["full_attention"] * 5}, ["'layer_types' lists 5 "]),
        ("gemma3", {"layer_types": ["full_attention"] * 7 + ["fuel"]}, ["'fuel'", "'layer_types'"]),
        ("gemma3", {"layer_types": "full_attention"}, ["'layer_types' is 'full_attention'"]),
        ("llama4_text", {"no_rope_layers": [1]}, ["'no_rope_layers' lists 1 ", "'num_hidden_layers' is 4"]),
        # What nobody computes
        ("llama", {"model_type": "no-such-model"}, ["'no-such-model'"]),
        ("llama", {"hidden_act": "no-such-function"}, ["'llama'", "'no-such-function'"]),
        ("qwen3_moe", {"hidden_act": "no-such-function"}, ["'qwen3_moe'", "'no-such-function'"]),
        ("llama", {"clip_qkv": 3.0}, ["'llama'", "clipped"]),
    ],
)
def test_config(
    model: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    changes: dict[str, Any],
    named: list[str],
) -> None:
    message = _refusal(_with_config(_copy(model(name), tmp_path), changes), capsys)
    assert all(part in message for part in named), message


@pytest.mark.parametrize(
    ("name", "tensor", "change", "named"),
    [
        ("qwen3_moe", "model.layers.1.mlp.experts.3.up_proj.weight", None, "missing"),
        ("qwen3_moe", "model.layers.1.mlp.gate.weight", None, "missing"),
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj", None, "missing"),
        ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias", None, "missing"),
        ("deepseek_v3", "model.layers.1.self_attn.kv_b_proj.weight", None, "missing"),
        ("mamba2", "backbone.layers.1.mixer.conv1d.weight", None, "missing"),
        (
            "gpt_oss",
            "model.layers.1.mlp.experts.gate_up_proj",
            lambda tensor: tensor[:3],
            "is [3, 64, 192], expected [4",
        ),
        (
            "qwen3_moe",
            "model.layers.1.mlp.experts.3.up_proj.weight",
            lambda tensor: tensor[:-1],
            "is [63, 64], expected",
        ),
        ("mamba2", "backbone.layers.1.mixer.in_proj.weight", lambda tensor: tensor[:-1], "is [295, 64], expected"),
    ],
)
def test_tensors(
    model: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    tensor: str,
    change: Callable[[Tensor], Tensor] | None,
    named: str,
) -> None:
    folder = _copy(model(name), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    found = tensors.pop(tensor)
    if change is not None:
        tensors[tensor] = change(found).contiguous()
    save_file(tensors, folder / "model.safetensors")
    message = _refusal(folder, capsys)
    assert (
        tensor.removesuffix(".weight").replace("backbone.", "model.") in message
    )  # by the name that all families have
    assert named in message


def test_experts_with_another_activation_run_without_the_recorded_program(
    model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The C++ kernel of experts has no exact gelu; the torch reference does."""
    folder = _with_config(_copy(model("mixtral"), tmp_path), {"hidden_act": "gelu"})
    assert main(["run", str(folder), *_RUN]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 1


def test_memory_for_experts_is_refused_without_experts_or_without_a_gpu(
    model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    message = _refusal(model("llama"), capsys, "--expert-memory", "1MiB")
    assert "--expert-memory" in message
    assert "'llama' has no experts" in message
    message = _refusal(model("mixtral"), capsys, "--expert-memory", "1MiB", "--device", "cpu")
    assert "--expert-memory" in message
    assert "runs on the CPU" in message


# --- GGUF ---


def _write_experts(path: Path, without: str = "", **settings: int) -> Path:
    """A GGUF file with experts in every layer."""
    hidden, width, names = gguf_builder.HIDDEN, 32, ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    random = np.random.default_rng(1)
    tensors = {}
    for layer in range(gguf_builder.LAYERS):
        tensors[f"blk.{layer}.ffn_gate_inp.weight"] = random.normal(0, 1, (_EXPERTS, hidden)).astype(np.float32)
        for name in names:
            shape = (_EXPERTS, hidden, width) if name == "ffn_down_exps" else (_EXPERTS, width, hidden)
            tensors[f"blk.{layer}.{name}.weight"] = random.normal(0, 1, shape).astype(np.float32)
    values = {"expert_count": _EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": width} | settings

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_pre("gpt-2")
        for key, value in values.items():
            writer.add_uint32(f"qwen3moe.{key}", value)

    dense = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")
    norms = {
        f"blk.{layer}.attn_{part}_norm.weight": np.ones(hidden // gguf_builder.HEADS, np.float32)
        for layer in range(gguf_builder.LAYERS)
        for part in "qk"
    }
    gguf_builder.write_model(path, "qwen3moe", write, tensors | norms, (*dense, without) if without else dense)
    return path


def test_gguf_that_is_not_changed_is_read(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(_write_experts(tmp_path / "model.gguf"))
    assert load_model(checkpoint, torch.device("cpu"), 64).decoder.description.features() == ("experts",)


@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_gguf_without_the_experts_of_a_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str) -> None:
    path = _write_experts(tmp_path / "model.gguf", f"blk.1.ffn_{part}_exps")
    assert f"model.layers.1.mlp.experts.{part}_proj" in _refusal(path, capsys)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"expert_used_count": 5}, "'expert_used_count' is 5 of 4"),
        ({"expert_gating_func": 9}, "9 ('expert_gating_func')"),
        ({"expert_group_count": 3}, "'expert_group_count' = 3"),
        ({"expert_count": 5}, "model.layers.0.mlp.experts.gate_proj.weight is [4, 32, 64], expected [5"),
        ({"attention.head_count_kv": 3}, "3 ('attention.head_count_kv')"),
    ],
)
def test_gguf_metadata(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, int], named: str
) -> None:
    assert named in _refusal(_write_experts(tmp_path / "model.gguf", **settings), capsys)
