"""Triton's experts against float64 twins: routing, the sort, the products of every kind of weights, whole layers."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU: test_triton.py runs this file under the interpreter", allow_module_level=True)

from tests.interpreter import slow_interpreted
from tokenmill.kernels.base import Declined
from tokenmill.kernels.triton.experts import choose
from tokenmill.kernels.triton.experts.choose import GEMV, PRODUCT, Plan, Tiling
from tokenmill.kernels.triton.experts.layer import GpuExperts
from tokenmill.kernels.triton.experts.order import max_blocks, sort_by_expert
from tokenmill.kernels.triton.experts.route import route
from tokenmill.kernels.triton.experts.rows import add_experts, quantize_groups
from tokenmill.kernels.triton.experts.stack import (
    GpuExpertStack,
    bf16_stack,
    fp8_stack,
    int4_stack,
    mxfp4_stack,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
ERROR = 8e-3 if ON_GPU else 1.3e-2  # two products with bf16 between them; the interpreter cuts off instead of rounding
FLOAT8_ERROR = 0.05 if ON_GPU else 0.16  # likewise
E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))


@dataclass(frozen=True)
class Spec:
    """As RoutingSpec of the reference has it."""

    experts_per_token: int
    score: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "two_best"
    correction_bias: Tensor | None = None
    activation: str = "silu"
    clamp: float = 0.0
    weights_on_input: bool = False


def error(got: Tensor, wanted: Tensor) -> float:
    assert not got.isnan().any()
    return float((got.double().cpu() - wanted).norm() / wanted.norm())


def route_twin(logits: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    logits = logits.double()
    scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "softmax_of_selected": logits}[spec.score]
    choice = scores if spec.correction_bias is None else scores + spec.correction_bias.double().cpu()
    if spec.num_groups > 1:
        groups = choice.unflatten(1, (spec.num_groups, -1))
        best = groups.amax(-1) if spec.group_score == "max" else groups.topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(best).scatter(1, best.topk(spec.top_groups).indices, 1.0)
        choice = groups.masked_fill(kept.unsqueeze(-1) == 0, -float("inf")).flatten(1)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : spec.experts_per_token].sort(-1).values
    weights = scores.gather(1, ids)
    if spec.score == "softmax_of_selected":
        weights = weights.softmax(-1)
    elif spec.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * spec.scale


ROUTERS = {
    "mixtral": (8, Spec(2)),
    "qwen3": (128, Spec(8)),
    "qwen2": (60, Spec(4, normalize=False)),
    "gpt_oss": (32, Spec(4, score="softmax_of_selected")),
    "llama4": (16, Spec(1, score="sigmoid", normalize=False, weights_on_input=True)),
    "deepseek_v2": (
        160,
        Spec(6, normalize=False, scale=16.0, num_groups=8, top_groups=3, group_score="max"),
    ),
    "deepseek_v3": (
        256,
        Spec(8, "sigmoid", True, 2.5, 8, 4, "two_best", torch.rand(256).to(DEVICE)),
    ),
    "kimi": (384, Spec(8, "sigmoid", True, 2.8, correction_bias=torch.rand(384).to(DEVICE))),
}


@pytest.mark.parametrize("family", sorted(ROUTERS))
def test_every_router(family: str) -> None:
    experts, spec = ROUTERS[family]
    logits = torch.randn(5, experts)
    ids, weights = route(logits.to(DEVICE), spec)
    wanted_ids, wanted = route_twin(logits, spec)
    assert ids.cpu().tolist() == wanted_ids.tolist()
    assert error(weights, wanted) < 1e-5


def test_equal_and_broken_logits_still_choose_experts() -> None:
    """Of equal scores the lower expert; what is not a number is chosen last, and an id is always an expert's."""
    logits = torch.zeros(4, 12)
    logits[1, 3:] = float("nan")
    logits[2] = float("nan")
    logits[3, 5] = -float("inf")
    ids, _ = route(logits.to(DEVICE), Spec(4))
    assert ids.tolist() == [[0, 1, 2, 3]] * 4
    ids, _ = route(logits.to(DEVICE), Spec(4, num_groups=3, top_groups=2, group_score="max"))
    assert all(sorted(set(row)) == row and row[-1] < 12 for row in ids.tolist())


def test_an_unknown_score_is_declined() -> None:
    with pytest.raises(Declined, match="softplus"):
        route(torch.zeros(1, 8).to(DEVICE), Spec(2, score="sqrt_softplus"))


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "rows"),
    [(1, 2, 8, 16), (40, 4, 8, 16), (60, 8, 40, 16), (150, 4, 60, 32), (90, 8, 130, 16)],
)
def test_assignments_sorted_by_expert(tokens: int, k: int, experts: int, rows: int) -> None:
    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)]).int()
    ids[: tokens // 2] = ids[0]  # some experts get many, some none
    order = sort_by_expert(ids.to(DEVICE), experts, rows)
    flat = ids.flatten().long()
    assert order.assignments.tolist() == flat.sort(dim=0, stable=True).indices.tolist()
    ends = flat.bincount(minlength=experts).cumsum(0).tolist()
    assert order.ends.tolist() == ends
    wanted = [(e, p) for e in range(experts) for p in range(ends[e - 1] if e else 0, ends[e], rows)]
    blocks = order.block_expert.tolist()
    assert len(blocks) == max_blocks(tokens * k, experts, rows) >= len(wanted)
    assert list(zip(blocks, order.block_first.tolist(), strict=True))[: len(wanted)] == wanted
    assert set(blocks[len(wanted) :]) <= {-1}


def test_the_worst_distribution_fits_the_table_of_blocks() -> None:
    for assignments, experts, rows in ((100, 8, 16), (7, 128, 16), (129, 128, 64), (4096, 3, 128)):
        worst = 0
        for hit in range(1, min(assignments, experts) + 1):  # one row each, the rest with the last
            worst = max(worst, hit - 1 + -(-(assignments - hit + 1) // rows))
        assert worst <= max_blocks(assignments, experts, rows)


def random_stack(
    kind: str, experts: int, rows: int, depth: int, bias: bool, gated: bool
) -> tuple[GpuExpertStack, Tensor, Tensor]:
    """A stack, the matrices it stands for in float64, and its biases."""
    shift = torch.randn(experts, rows) * 0.5 if bias else None
    exact_shift = torch.zeros(experts, rows).double() if shift is None else shift.double()
    halves = 2 if gated else 1
    if kind == "bf16":
        values = (torch.randn(experts, rows, depth) * depth**-0.5).bfloat16()
        return bf16_stack(values.to(DEVICE), shift), values.double(), exact_shift
    if kind.startswith("fp8"):
        codes = (torch.randn(experts, rows, depth) * 30).to(torch.float8_e4m3fn)
        if kind == "fp8_block":
            blocks = -(-rows // halves // 128), -(-depth // 128)
            scales = (torch.rand(experts, halves, *blocks) + 0.1) * 0.05 * depth**-0.5
            wide = scales.repeat_interleave(128, 2)[:, :, : rows // halves].flatten(1, 2)
            spread = wide.repeat_interleave(128, 2)[:, :, :depth]
            stored = scales.flatten(1, 2)
        else:
            stored = (torch.rand(experts, rows if kind == "fp8_row" else 1) + 0.1) * 0.05 * depth**-0.5
            spread = stored[:, :, None]
        return fp8_stack(codes.to(DEVICE), stored, shift, halves), codes.double() * spread.double(), exact_shift
    if kind.startswith("int4"):
        group = 32 if kind == "int4_zeros" or depth % 64 else 64
        whole = torch.randint(-8, 8, (experts, rows, depth), dtype=torch.int8)
        scales = (torch.rand(experts, rows, depth // group) + 0.1) * 0.2 * depth**-0.5
        zeros = torch.randint(-4, 4, scales.shape).float() if kind == "int4_zeros" else None
        less = 0.0 if zeros is None else zeros.double().repeat_interleave(group, 2)
        values = (whole.double() - less) * scales.double().repeat_interleave(group, 2)
        moved = None if zeros is None else zeros.to(DEVICE)
        return int4_stack(whole.to(DEVICE), scales.to(DEVICE), moved, shift), values, exact_shift
    packed = torch.randint(0, 256, (experts, rows, depth // 2), dtype=torch.uint8)
    exponents = torch.randint(118, 124, (experts, rows, depth // 32), dtype=torch.uint8)
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(2).long()
    values = E2M1[nibbles & 7].double() * torch.where(nibbles > 7, -1.0, 1.0).double()
    values = values * torch.exp2(exponents.double() - 127).repeat_interleave(32, 2)
    return mxfp4_stack(packed.to(DEVICE), exponents.to(DEVICE), shift), values, exact_shift


def layer_twin(x: Tensor, ids: Tensor, weights: Tensor, matrices: list[Tensor], spec: Spec) -> Tensor:
    gate_up, up_bias, down, down_bias = matrices
    y = torch.zeros(x.shape[0], down.shape[1], dtype=torch.float64)
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token].double().tolist(), strict=True):
            row = x[token].double() * (weight if spec.weights_on_input else 1.0)
            gate, up = (gate_up[expert] @ row + up_bias[expert]).chunk(2)
            if spec.clamp:
                gate, up = gate.clamp(max=spec.clamp), up.clamp(-spec.clamp, spec.clamp)
                inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            else:
                inner = torch.nn.functional.silu(gate) * up
            y[token] += (down[expert] @ inner + down_bias[expert]) * (1.0 if spec.weights_on_input else weight)
    return y


KINDS = ["bf16", "fp8", "fp8_row", "fp8_block", "int4", "int4_zeros", "mxfp4"]


def make_layer(
    kind: str, spec: Spec, experts: int = 4, hidden: int = 192, inner: int = 160, bias: bool = True
) -> tuple[GpuExperts, list[Tensor]]:
    """Shapes that are no whole number of tiles or blocks."""
    gate_up, first, first_bias = random_stack(kind, experts, 2 * inner, hidden, bias, True)
    down, second, second_bias = random_stack(kind, experts, hidden, inner, bias, False)
    return GpuExperts(gate_up, down, spec), [first, first_bias, second, second_bias]


def check(layer: GpuExperts, matrices: list[Tensor], tokens: int, plan: Plan | None = None) -> None:
    spec = layer.spec
    assert isinstance(spec, Spec)
    x = torch.randn(tokens, layer.gate_up.depth).bfloat16()
    logits = torch.randn(tokens, layer.gate_up.num_experts)
    ids, weights = route_twin(logits, spec)
    got = layer.multiply(x.to(DEVICE), ids.int().to(DEVICE), weights.float().to(DEVICE), plan)
    assert got.dtype == torch.bfloat16
    limit = FLOAT8_ERROR if layer.gate_up.kind == "fp8" and (plan or layer.choose(tokens)).kernel == PRODUCT else ERROR
    assert error(got, layer_twin(x, ids, weights, matrices, spec)) < limit


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 18])
def test_layers_of_every_kind(kind: str, tokens: int) -> None:
    layer, matrices = make_layer(kind, Spec(2))
    check(layer, matrices, tokens)


@pytest.mark.parametrize("kind", [pytest.param("bf16", marks=slow_interpreted), "fp8_block", "mxfp4"])
@pytest.mark.parametrize("tokens", [2, pytest.param(7, marks=slow_interpreted)])
def test_clamped_activation_with_biases(kind: str, tokens: int) -> None:
    """GPT-OSS: what exceeds the limit is cut off."""
    layer, matrices = make_layer(kind, Spec(2, score="softmax_of_selected", clamp=0.7))
    check(layer, matrices, tokens)


@pytest.mark.parametrize("tokens", [1, 7])
def test_weights_on_the_input(tokens: int) -> None:
    spec = Spec(2, score="sigmoid", normalize=False, weights_on_input=True)
    layer, matrices = make_layer("bf16", spec)
    check(layer, matrices, tokens)


@pytest.mark.parametrize("kind", [pytest.param("bf16", marks=slow_interpreted), "fp8_block"])
def test_weights_copied_by_descriptors(kind: str) -> None:
    tiling = Tiling(64, 128, 4, 1, descriptor=True)
    layer, matrices = make_layer(kind, Spec(2), bias=False)
    check(layer, matrices, 40, Plan(PRODUCT, 32, tiling, replace(tiling, blocks=3)))


def test_experts_in_several_blocks() -> None:
    """All tokens choose the same two of many experts; the others' blocks are unused."""
    layer, matrices = make_layer("bf16", Spec(2), experts=9, hidden=64, inner=32)
    x, ids = torch.randn(37, 64).bfloat16(), torch.tensor([[2, 7]]).repeat(37, 1)
    weights = torch.rand(37, 2)
    plan = Plan(PRODUCT, 16, Tiling(32, 64, 4, 1, blocks=2), Tiling(32, 64, 4, 1))
    got = layer.multiply(x.to(DEVICE), ids.int().to(DEVICE), weights.to(DEVICE), plan)
    assert error(got, layer_twin(x, ids, weights, matrices, replace(Spec(2)))) < ERROR


def test_a_layer_from_logits_and_in_float32() -> None:
    layer, matrices = make_layer("bf16", Spec(2), hidden=64, inner=32)
    x, logits = torch.randn(6, 64).bfloat16().float(), torch.randn(6, 4)
    got = layer(x.to(DEVICE), logits.to(DEVICE))
    assert got.dtype == torch.float32
    assert error(got, layer_twin(x, *route_twin(logits, Spec(2)), matrices, Spec(2))) < ERROR


def test_scales_of_e2m1_far_apart_and_large() -> None:
    """Scales above 2 and a row whose groups differ by more than bf16's exponents: only the largest count."""
    packed = torch.full((1, 16, 32), 0x77, dtype=torch.uint8)  # 6 everywhere
    exponents = torch.tensor([200, 10], dtype=torch.uint8).repeat(1, 16, 1)
    stack = mxfp4_stack(packed, exponents)
    assert stack.tensors.row_scale is not None
    assert stack.tensors.row_scale.tolist() == [2.0**73] * 16
    assert stack.tensors.scales is not None
    assert (stack.tensors.scales & 255).tolist() == [[253] * 16]
    assert ((stack.tensors.scales >> 8) & 255).tolist() == [[63] * 16]


def test_rows_in_float8_and_their_sum() -> None:
    x = torch.randn(3, 300).bfloat16()
    x[1, 128:256] = 0
    codes, scales = quantize_groups(x.to(DEVICE))
    spread = scales.cpu().double().repeat_interleave(128, 1)[:, :300]
    assert error(codes.cpu().double() * spread, x.double()) < FLOAT8_ERROR
    assert scales.shape == (3, 3)
    rows = torch.randn(6, 70).bfloat16()
    assert error(add_experts(rows.to(DEVICE), 3, torch.float32), rows.double().view(2, 3, 70).sum(1)) < 1e-6


def test_activations_and_scales_without_a_kernel_are_declined() -> None:
    layer, _ = make_layer("bf16", Spec(2), hidden=64, inner=32)
    with pytest.raises(Declined, match="gelu_tanh"):
        GpuExperts(layer.gate_up, layer.down, Spec(2, activation="gelu_tanh"))
    with pytest.raises(Declined, match="scales"):
        fp8_stack(torch.zeros(2, 256, 256, dtype=torch.float8_e4m3fn), torch.ones(2, 4, 4))
    codes = torch.zeros(2, 192, 128, dtype=torch.float8_e4m3fn)
    joined, down = fp8_stack(codes, torch.ones(2, 2, 1)), bf16_stack(torch.zeros(2, 128, 96))
    with pytest.raises(Declined, match="96 of each"):
        GpuExperts(joined, down, Spec(2))
    with pytest.raises(Declined, match="48"):
        mxfp4_stack(torch.zeros(1, 16, 24, dtype=torch.uint8), torch.zeros(1, 16, 1, dtype=torch.uint8))


def test_the_rule_is_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "INTERPRETED", False)

    def chosen(kind: str, counts: list[int]) -> list[tuple[str, int]]:
        plans = [choose.rule(kind, 128, 8, tokens, 768) for tokens in counts]
        return [(plan.kernel, plan.tokens) for plan in plans]

    assert chosen("bf16", [1, 4, 5, 128]) == [(GEMV, 0), (GEMV, 0), (PRODUCT, 16), (PRODUCT, 16)]
    assert chosen("mxfp4", [1, 256, 640, 704, 4096]) == [(PRODUCT, size) for size in (16, 32, 32, 64, 128)]
    assert chosen("bf16", [256, 448, 464]) == [(PRODUCT, 32), (PRODUCT, 32), (PRODUCT, 64)]
    assert [choose.piece(depth, 1024) for depth in (768, 1408, 2048)] == [256, 512, 1024]
    for kind in ("bf16", "fp8", "int4", "mxfp4"):
        for tokens in (1, 16, 256, 4096):
            plans = choose.candidates(kind, 128, 8, tokens, 768)
            assert choose.rule(kind, 128, 8, tokens, 768) == plans[0]
            assert len(plans) == len(set(plans)) > 2
    for kind in ("fp8", "mixed"):  # a step is a block of float8 scales; stacks of two kinds may have one
        for tokens in (16, 256, 512, 1024, 4096, 16384):
            plans = [each for each in choose.candidates(kind, 128, 8, tokens, 768) if kind == "fp8"]
            plans.append(choose.rule(kind, 128, 8, tokens, 768))
            assert {tiling.depth for plan in plans for tiling in (plan.gate_up, plan.down)} == {128}
