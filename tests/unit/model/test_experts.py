"""Experts: routing as the papers define it, every layout of safetensors read as the same matrices, bad files named."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.parity.engine_logits import engine_logits
from tests.parity.tiny_models import make
from tokenmill.checkpoint.hf_config import describe
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import CheckpointError
from tokenmill.kernels.ref_experts import RoutingSpec, route, run_experts
from tokenmill.model.formats.quantized import E2M1_VALUES
from tokenmill.model.layers.experts import Experts
from tokenmill.model.loader import load_model

IDS = torch.randint(3, 131, (30,), generator=torch.Generator().manual_seed(0)).tolist()
CPU = torch.device("cpu")


def _rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, path)


# --- routing ---


def test_ties_go_to_the_lower_expert_and_ids_ascend() -> None:
    ids, weights = route(torch.tensor([[1.0, 2.0, 2.0, 2.0], [3.0, 0.0, 0.0, 3.0]]), RoutingSpec(2))
    assert ids.tolist() == [[1, 2], [0, 3]]
    assert ids.dtype == torch.int32
    torch.testing.assert_close(weights, torch.full((2, 2), 0.5))


def test_weights_come_from_the_unbiased_scores() -> None:
    logits = torch.tensor([[2.0, 1.0, -1.0, -2.0]])
    spec = RoutingSpec(2, "sigmoid", scale=2.5, correction_bias=torch.tensor([0.0, 0.0, 5.0, 9.0]))
    ids, weights = route(logits, spec)
    assert ids.tolist() == [[2, 3]]
    chosen = logits[0, 2:].sigmoid()
    torch.testing.assert_close(weights[0], 2.5 * chosen / chosen.sum())


@pytest.mark.parametrize(("group_score", "expected"), [("max", [0, 1]), ("two_best", [4, 5])])
def test_groups(group_score: str, expected: list[int]) -> None:
    """Of three groups of two, the first has the best expert, the last the best pair."""
    logits = torch.tensor([[3.0, -9.0, 1.0, 1.0, 2.9, 2.8]])
    spec = RoutingSpec(2, "sigmoid", normalize=False, num_groups=3, top_groups=1, group_score=group_score)
    ids, weights = route(logits, spec)
    assert ids.tolist() == [expected]
    torch.testing.assert_close(weights, logits.sigmoid()[:, expected])


def _peer_router(version: str, **changes: Any) -> Any:
    """transformers' own router of DeepSeek, with random weights and biases."""
    module = import_module(f"transformers.models.deepseek_{version}.modeling_deepseek_{version}")
    config = module.__dict__[f"Deepseek{version.upper()}Config"](
        hidden_size=64, n_routed_experts=12, num_experts_per_tok=3, **changes
    )
    router = module.__dict__[f"Deepseek{version.upper()}TopkRouter"](config)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=generator))
        for name, buffer in router.named_buffers():
            assert name == "e_score_correction_bias"
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
    return router, config


@pytest.mark.parametrize(
    ("version", "changes"),
    [
        ("v2", {"topk_method": "greedy", "routed_scaling_factor": 16.0}),
        ("v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "norm_topk_prob": True}),
        ("v3", {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}),
        ("v3", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    ],
)
def test_deepseek_routes_as_transformers_does(version: str, changes: dict[str, Any]) -> None:
    router, config = _peer_router(version, **changes)
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
    logits, theirs, ids = (each.detach() for each in router(x))
    ffn = describe({**config.to_dict(), "vocab_size": 100}).layers[-1].feed_forward
    assert ffn is not None
    assert ffn.routing is not None
    bias = dict(router.named_buffers()).get("e_score_correction_bias")
    r = ffn.routing
    assert r.correction_bias == (bias is not None)
    spec = RoutingSpec(
        ffn.experts_per_token, r.score, r.normalize, r.scale, r.num_groups, r.top_groups, r.group_score, bias
    )
    order = ids.sort(-1)
    ours, weights = route(logits, spec)
    assert torch.equal(ours.long(), order.values)
    torch.testing.assert_close(weights, theirs.gather(1, order.indices))


def test_softmax_of_the_selected_needs_no_positive_logit() -> None:
    logits = torch.tensor([[-50.0, -52.0, -51.0]])
    ids, weights = route(logits, RoutingSpec(2, "softmax_of_selected"))
    assert ids.tolist() == [[0, 2]]
    torch.testing.assert_close(weights, logits[:, [0, 2]].softmax(-1))


def test_equal_experts_are_one_mlp() -> None:
    """Any router whose weights sum to one reproduces the dense MLP, alone and in a batch."""
    generator = torch.Generator().manual_seed(3)
    x, logits = torch.randn(9, 16, generator=generator), torch.randn(9, 6, generator=generator)
    inputs, output = torch.randn(40, 16, generator=generator), torch.randn(16, 20, generator=generator)
    spec = RoutingSpec(3)
    functions = (lambda _, rows: rows @ inputs.T), (lambda _, rows: rows @ output.T)
    mixed = run_experts(x, *route(logits, spec), *functions, spec)
    gate, up = (x @ inputs.T).chunk(2, -1)
    torch.testing.assert_close(mixed, (torch.nn.functional.silu(gate) * up) @ output.T)
    alone = run_experts(x[4:5], *route(logits[4:5], spec), *functions, spec)
    torch.testing.assert_close(alone, mixed[4:5])


# --- layouts ---


def _fuse(tensors: dict[str, Tensor], prefix: str = "mlp.experts", count: int = 8) -> dict[str, Tensor]:
    """Separate experts as tools save them that keep experts fused: gate and up rows joined, experts stacked."""
    for layer in {name.split(".")[2] for name in tensors if ".experts.0." in name}:
        start = f"model.layers.{layer}.{prefix}"
        part = {
            name: torch.stack([tensors.pop(f"{start}.{expert}.{name}.weight") for expert in range(count)])
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{start}.gate_up_proj"] = torch.cat([part["gate_proj"], part["up_proj"]], 1)
        tensors[f"{start}.down_proj"] = part["down_proj"]
    return tensors


def test_fused_names_are_read(tmp_path: Path) -> None:
    make("qwen3_moe", tmp_path)
    expected = engine_logits(tmp_path, IDS, "eager")
    _rewrite(tmp_path, _fuse)
    torch.testing.assert_close(engine_logits(tmp_path, IDS, "eager"), expected, rtol=0, atol=1e-6)


def to_blocks(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """GPT-OSS's experts as published, in MXFP4, and the same values as floats in the unpublished layout."""
    blocks, floats = dict(tensors), dict(tensors)
    generator = torch.Generator().manual_seed(7)
    values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, columns, out = tensors[name].shape  # [experts, in, out]
        codes = torch.randint(0, 16, (count, out, columns // 32, 32), generator=generator)
        scales = torch.randint(118, 122, (count, out, columns // 32), generator=generator)
        packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
        del blocks[name]
        blocks |= {f"{name}_blocks": packed, f"{name}_scales": scales.to(torch.uint8)}
        expanded = values[codes] * torch.exp2(scales - 127.0).unsqueeze(-1)
        floats[name] = expanded.flatten(2).transpose(1, 2)
    return blocks, floats


def test_mxfp4_blocks_are_read(tmp_path: Path) -> None:
    make("gpt_oss", tmp_path)
    blocks, floats = to_blocks(load_file(tmp_path / "model.safetensors"))
    _rewrite(tmp_path, lambda _: floats)
    expected = engine_logits(tmp_path, IDS, "eager")
    _rewrite(tmp_path, lambda _: blocks)
    torch.testing.assert_close(engine_logits(tmp_path, IDS, "eager"), expected, rtol=0, atol=1e-5)
    mlp = load_model(open_checkpoint(tmp_path), CPU, 8, "ref").decoder.blocks[0].mlp
    assert isinstance(mlp, Experts)
    stack = mlp.stacks.gate_up
    assert stack.type_name == "MXFP4"
    parts = stack.parts()  # gate rows first, whatever the file interleaves
    assert {role: tuple(part.shape) for role, part in parts.items()} == {"packed": (4, 192, 32), "scales": (4, 192, 2)}
    assert stack.bias is not None
    torch.testing.assert_close(stack[2].dequantize(90, 100), stack[2].dequantize(0, 192)[90:100])


# --- bad input ---


def _error(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(open_checkpoint(folder), CPU, 8, "ref")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    make("mixtral", tmp_path)
    name = "model.layers.2.block_sparse_moe.experts.3.w2.weight"
    _rewrite(tmp_path, lambda tensors: {key: value for key, value in tensors.items() if key != name})
    assert f"missing tensors: {name}" in _error(tmp_path)


def test_a_missing_router_is_named(tmp_path: Path) -> None:
    make("mixtral", tmp_path)
    name = "model.layers.1.block_sparse_moe.gate.weight"
    _rewrite(tmp_path, lambda tensors: {key: value for key, value in tensors.items() if key != name})
    assert f"missing tensors: {name}" in _error(tmp_path)


def test_a_stack_of_another_shape_is_named(tmp_path: Path) -> None:
    make("gpt_oss", tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    _rewrite(tmp_path, lambda tensors: {**tensors, name: tensors[name][:3]})
    assert f"{name} is [3, 64, 192], expected [4, 64, 192]" in _error(tmp_path)


CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"topk_method": "auction"}, "'auction' ('topk_method') is not known"),
        ({"scoring_func": "sqrtsoftplus"}, "'sqrtsoftplus' ('scoring_func')"),
        ({"n_group": 3}, "8 experts do not divide into 'n_group' = 3"),
        ({"n_group": 4, "topk_group": 5}, "'topk_group' = 5"),
        ({"n_group": 8, "topk_group": 1}, "fewer experts than 'num_experts_per_tok'"),
        ({"num_experts_per_tok": 9}, "'num_experts_per_tok' is 9 of 8 experts"),
    ],
)
def test_a_router_that_cannot_be_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        describe({**CONFIG, **changes})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_clipped_projections_are_declined(tmp_path: Path) -> None:
    make("olmoe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "clip_qkv": 8.0}))
    assert "clipped queries, keys and values" in _error(tmp_path)
