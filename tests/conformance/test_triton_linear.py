"""Triton's products against float64 twins: bf16, fp8, int8, grouped 4 and 8 bits, ggml types, neutral schemes."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU: test_triton.py runs this file under the interpreter", allow_module_level=True)

from tokenmill.kernels.base import Declined
from tokenmill.kernels.ggml_types import TYPES
from tokenmill.kernels.ref_ggml import dequantize
from tokenmill.kernels.triton.fused.elementwise import quantize_rows
from tokenmill.kernels.triton.matmul import dequantize as expansion
from tokenmill.kernels.triton.matmul import repack
from tokenmill.kernels.triton.matmul.blocks import BlockLinear, block_product
from tokenmill.kernels.triton.matmul.choose import (
    GEMV,
    GROUPED,
    HOPPER,
    HOPPER_WIDE,
    SKINNY,
    Plan,
    PlanTable,
    Tiling,
    candidates,
    rule,
)
from tokenmill.kernels.triton.matmul.joined import join_linears
from tokenmill.kernels.triton.matmul.linear import DenseLinear, GpuLinear, GroupedLinear, ScaledLinear
from tokenmill.kernels.triton.matmul.make import from_quantized, make_linear, make_router, quantize_at_load
from tokenmill.kernels.triton.shared.launch import on_hopper
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ERROR = 6e-3  # bf16 input and output; the interpreter cuts off instead of rounding
FLOAT8_ERROR = 0.04 if torch.cuda.is_available() else 0.14  # likewise
SHAPES = [(1, 70, 208), (18, 33, 320)]  # tokens, rows, depth


def error(got: Tensor, wanted: Tensor) -> float:
    assert not got.isnan().any()
    return float((got.double().cpu() - wanted.double().cpu()).norm() / wanted.double().cpu().norm())


def tokens(count: int, depth: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(count, depth).to(DEVICE, dtype)


@pytest.mark.parametrize(("count", "rows", "depth"), SHAPES)
@pytest.mark.parametrize("kernel", [SKINNY, GEMV])
def test_dense(count: int, rows: int, depth: int, kernel: str) -> None:
    weight, bias, x = torch.randn(rows, depth).bfloat16(), torch.randn(rows), tokens(count, depth)
    linear = DenseLinear(weight.to(DEVICE), bias)
    wanted = x.double().cpu() @ weight.double().T + bias.double()
    for splits in (1, 3):
        plan = Plan(kernel, Tiling(16, 64, splits, 4, 2))
        assert error(linear.multiply(x, torch.bfloat16, plan), wanted) < ERROR
    assert linear(x.float()).dtype == torch.float32
    assert error(linear(x.float()), wanted) < ERROR


@pytest.mark.parametrize(("count", "rows", "depth"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_one_scale_per_row_and_token(count: int, rows: int, depth: int, dtype: torch.dtype) -> None:
    codes = (torch.randn(rows, depth) * 40).clamp(-127, 127).to(dtype)
    scales, x = torch.rand(rows) + 0.1, tokens(count, depth)
    linear = ScaledLinear(codes.to(DEVICE), scales, None)
    x_codes, x_scales = (torch.randn(count, depth) * 40).clamp(-127, 127).to(dtype), torch.rand(count) + 0.1
    wanted = (x_codes.double() @ codes.double().T) * x_scales[:, None].double() * scales.double()
    assert error(linear.multiply_quantized(x_codes.to(DEVICE), x_scales.to(DEVICE)), wanted) < ERROR
    whole = x.double().cpu() @ (codes.double() * scales[:, None].double()).T
    assert error(linear(x), whole) < (FLOAT8_ERROR if dtype == torch.float8_e4m3fn else 0.015)


def float8_blocks(rows: int, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, a scale for every 128 x 128, and what they mean in float64."""
    codes = (torch.randn(rows, depth) * 40).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 128), -(-depth // 128)) + 0.1
    wide = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :depth]
    return codes, scales, codes.double() * wide.double()


@pytest.mark.parametrize(("count", "rows", "depth"), [(1, 200, 320), (18, 384, 256), (40, 72, 1024)])
def test_float8_in_blocks(count: int, rows: int, depth: int) -> None:
    codes, scales, dense = float8_blocks(rows, depth)
    x_codes = (torch.randn(count, depth) * 40).to(torch.float8_e4m3fn)
    x_scales, bias = torch.rand(count, -(-depth // 128)) + 0.1, torch.randn(rows)
    wanted = x_codes.double() * x_scales.double().repeat_interleave(128, 1)[:, :depth] @ dense.T + bias.double()
    moved = (each.to(DEVICE) for each in (x_codes, x_scales, codes, scales, bias))
    assert error(block_product(*moved), wanted) < ERROR
    matrix = QuantizedMatrix(Scheme("e4m3", 8, 128, 128, activations="fp8_group128"), codes.view(torch.uint8), scales)
    linear, x = from_quantized(matrix, bias.to(DEVICE), DEVICE), tokens(count, depth)
    assert isinstance(linear, BlockLinear)
    assert error(linear(x), x.double().cpu() @ dense.T + bias.double()) < FLOAT8_ERROR


def test_float8_in_blocks_is_joined_where_blocks_stay_whole() -> None:
    parts = [float8_blocks(rows, 256) for rows in (256, 128, 72)]
    linears = [BlockLinear(codes.to(DEVICE), scales, None) for codes, scales, _ in parts]
    x, joined = tokens(3, 256), join_linears(linears)
    assert joined is not None
    assert torch.equal(joined(x), torch.cat([linear(x) for linear in linears], 1))
    assert join_linears(linears[::-1]) is None


@pytest.mark.parametrize("count", [1, 5, 40])
def test_a_router_is_not_rounded(count: int) -> None:
    weight, bias, x = torch.randn(24, 320).bfloat16(), torch.randn(24), tokens(count, 320)
    router = make_router(weight.float().to(DEVICE), bias)
    assert router is not None
    logits = router.multiply(x, torch.float32)
    assert error(logits, x.double().cpu() @ weight.double().T + bias.double()) < 1e-5
    assert make_router(torch.randn(24, 320, device=DEVICE), None) is None, "it would be rounded to bf16"


@pytest.mark.parametrize(
    ("group", "bits", "affine"),
    [(16, 4, True), (32, 4, True), (64, 4, False), (128, 4, False), (128, 4, True), (32, 8, True), (128, 8, False)],
)
def test_groups(group: int, bits: int, affine: bool) -> None:
    rows, depth = 20, group * 5  # not a whole number of blocks
    limit = 2 ** (bits - 1)
    codes = torch.randint(-limit, limit, (rows, depth), dtype=torch.int8)
    scales = torch.rand(rows, 5) + 0.1
    zeros = torch.randint(-5, 5, (rows, 5)).float() if affine else None
    weight = repack.pack_groups(codes.to(DEVICE), scales.to(DEVICE), None if zeros is None else zeros.to(DEVICE), bits)
    spread = 0.0 if zeros is None else zeros.double().repeat_interleave(group, 1)
    exact = (codes.double() - spread) * scales.double().repeat_interleave(group, 1)
    assert error(expansion.dequantize(weight), exact) < ERROR
    linear = GroupedLinear(weight, torch.ones(rows), "")
    for count in (1, 70):  # scales after the sum; in the weights from 64 tokens on
        x = tokens(count, depth)
        for splits in (2,) if count == 1 else (1,):
            plan = Plan(GROUPED, Tiling(16, 0, splits, 4, 2, 0, 64))
            got = linear.multiply(x, torch.bfloat16, plan)
            assert error(got, x.double().cpu() @ exact.T + 1) < ERROR, (count, splits)


@pytest.mark.parametrize(
    ("group", "depth", "affine", "warps"), [(128, 640, False, 1), (32, 1024, True, 2), (64, 320, False, 4)]
)
def test_groups_with_one_token_and_no_tensor_core(group: int, depth: int, affine: bool, warps: int) -> None:
    """Whole pieces of a row, and pieces that end beyond it."""
    rows = 22
    codes, scales = torch.randint(-8, 8, (rows, depth), dtype=torch.int8), torch.rand(rows, depth // group) + 0.1
    zeros = torch.randint(-5, 5, scales.shape).float() if affine else None
    weight = repack.pack_groups(codes.to(DEVICE), scales.to(DEVICE), None if zeros is None else zeros.to(DEVICE), 4)
    spread = 0.0 if zeros is None else zeros.double().repeat_interleave(group, 1)
    exact = (codes.double() - spread) * scales.double().repeat_interleave(group, 1)
    bias, x = torch.randn(rows), tokens(1, depth)
    linear, plan = GroupedLinear(weight, bias, ""), Plan(GEMV, Tiling(4, warps=warps))
    wanted = x.double().cpu() @ exact.T + bias.double()
    assert error(linear.multiply(x, torch.float32, plan), wanted) < ERROR / 4
    got = linear.multiply(x, torch.float32, plan, gated=True)
    assert error(got, torch.nn.functional.silu(wanted[:, : rows // 2]) * wanted[:, rows // 2 :]) < ERROR


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("rows", [44, 140])  # no whole number of tiles
def test_a_product_whose_halves_gate_each_other(kind: str, rows: int) -> None:
    values, bias, x = torch.randn(rows, 256), torch.randn(rows), tokens(1 if kind != "int4" else 3, 256)
    if kind == "bf16":
        linear: GpuLinear = DenseLinear(values.bfloat16().to(DEVICE), bias)
        values = values.bfloat16()
    else:
        linear = quantize_at_load(values.to(DEVICE), bias, kind)
    assert linear.gates(len(x))
    whole = linear.multiply(x, torch.float32).double().cpu()
    if kind == "bf16":
        assert error(whole, x.double().cpu() @ values.double().T + bias.double()) < ERROR
    wanted = torch.nn.functional.silu(whole[:, : rows // 2]) * whole[:, rows // 2 :]
    assert error(linear.multiply(x, torch.float32, gated=True), wanted) < 1e-4
    if kind == "fp8":
        rounded = quantize_rows(x, "fp8")
        whole = linear.multiply_quantized(*rounded, torch.float32).double().cpu()  # type: ignore[attr-defined]
        wanted = torch.nn.functional.silu(whole[:, : rows // 2]) * whole[:, rows // 2 :]
        got = linear.multiply_quantized(*rounded, torch.float32, gated=True)  # type: ignore[attr-defined]
        assert error(got, wanted) < 1e-4


@pytest.mark.skipif(not on_hopper(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(
    ("count", "rows", "depth"),
    [
        (65, 512, 1280),
        (128, 384, 4096),
        (130, 456, 2048),  # a tile with rows beyond the last
        (192, 768, 1920),
        (256, 1536, 2304),  # shares that end within a tile
        (300, 256, 384),
        (512, 1280, 4096),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_many_tokens_on_hopper(dtype: torch.dtype, group: int, affine: bool, count: int, rows: int, depth: int) -> None:
    codes = torch.randint(-8, 8, (rows, depth), dtype=torch.int8)
    scales = torch.rand(rows, depth // group) + 0.1
    zeros = torch.randint(-5, 5, scales.shape).float() if affine else None
    weight = repack.pack_groups(codes.to(DEVICE), scales.to(DEVICE), None if zeros is None else zeros.to(DEVICE), 4)
    bias = torch.randn(rows)
    linear = GroupedLinear(weight, bias, "")
    spread = 0.0 if zeros is None else zeros.double().repeat_interleave(group, 1)
    exact = (codes.double() - spread) * scales.double().repeat_interleave(group, 1)
    x = tokens(count, depth, dtype)
    wanted = x.double().cpu() @ exact.T + bias.double()
    names = [HOPPER, HOPPER_WIDE] if count > 128 else [HOPPER]
    for multiply in [partial(linear.multiply, plan=Plan(name)) for name in names]:
        got = [multiply(x, dtype) for _ in range(4)]  # counters are left as they were
        assert error(got[0], wanted) < ERROR
        assert all(torch.equal(again, got[0]) for again in got)
        if rows % 256 == 0:
            gated = torch.nn.functional.silu(wanted[:, : rows // 2]) * wanted[:, rows // 2 :]
            got = [multiply(x, gated=True) for _ in range(4)]
            assert error(got[0], gated) < 2 * ERROR
            assert all(torch.equal(again, got[0]) for again in got)


@pytest.mark.skipif(not on_hopper(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("count", [192, 256, 512])
def test_hopper_gives_the_same_bits_every_time(gated: bool, count: int) -> None:
    """Every program goes from tile to tile and shares some: copies, products and sums of different tiles overlap."""
    linear = quantize_at_load(torch.randn(14336, 2048).to(DEVICE), None, "int4")
    assert isinstance(linear, GroupedLinear)
    from tokenmill.kernels.triton.matmul.hopper.wide import wide_matmul  # imports Gluon

    x = tokens(count, 2048)
    first = wide_matmul(x, linear.weight, gated=gated)
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(100):  # launched without a pause: each starts while the one before ends
        different += (wide_matmul(x, linear.weight, gated=gated) != first).sum()
    assert different == 0
    whole = x.double() @ expansion.dequantize(linear.weight).double().T
    wanted = torch.nn.functional.silu(whole[:, :7168]) * whole[:, 7168:] if gated else whole
    assert error(first, wanted) < (2 if gated else 1) * ERROR


@pytest.mark.parametrize(("tiles", "steps"), [(48, 16), (224, 16), (32, 56), (4, 2), (1, 1), (3, 40), (1002, 16)])
@pytest.mark.parametrize("programs", [132, 66, 1])
@pytest.mark.parametrize("most", [4, 8])
def test_programs_share_the_blocks_of_all_tiles(tiles: int, steps: int, programs: int, most: int) -> None:
    """No more programs than can run at once, since they wait for each other; no more on a tile than add up its sums."""
    plan_shares = pytest.importorskip("tokenmill.kernels.triton.matmul.hopper.wide").plan_shares
    share, partners = plan_shares(tiles, steps, programs, most)
    takers = [{block // share for block in range(tile * steps, (tile + 1) * steps)} for tile in range(tiles)]
    assert set.union(*takers) == set(range(-(-tiles * steps // share)))
    assert max(set.union(*takers)) < programs
    assert max(map(len, takers)) <= partners <= most
    assert partners.bit_count() == 1
    for program in set.union(*takers):  # a program has room for the sums of two tiles, its first and another
        shared = [tile for tile in range(tiles) if program in takers[tile] and len(takers[tile]) > 1]
        assert sum(tile != program * share // steps for tile in shared) <= 1


def ggml_blocks(name: str, rows: int, depth: int) -> Tensor:
    """Random bytes with scales of a sane size."""
    kind = TYPES[name]
    blocks = torch.randint(0, 256, (rows * depth // kind.block_size, kind.block_bytes), dtype=torch.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2)}
    halves |= {"Q5_1": (0, 2), "MXFP4": (), "NVFP4": (), "IQ1_M": (), "TQ1_0": (52,), "TQ2_0": (64,)}
    for place in halves.get(name, (0,)):
        blocks[:, place : place + 2] = (torch.rand(len(blocks), 1) * 0.01).half().view(torch.uint8)
    if name == "MXFP4":
        blocks[:, 0] = torch.randint(120, 130, (len(blocks),)).to(torch.uint8)
    if name == "NVFP4":
        blocks[:, :4] = blocks[:, :4] % 32 + 16
    if name == "IQ1_M":  # the exponent of its scale, in the top bits of its last word
        blocks[:, 55] = blocks[:, 55] & 15 | 0x20
    if name in ("Q4_K", "Q5_K"):
        blocks[::3, 4] = 0  # a group whose scale is 0 and whose minimum is not
    return blocks.view(rows, -1)


class Stored:
    """A StoredWeight of one tensor."""

    precise = False
    activations = "none"
    input_scale = None

    def __init__(self, type_name: str, parts: dict[str, Tensor], shape: tuple[int, int]) -> None:
        self.type_name, self._parts = type_name, parts
        self.out_features, self.in_features = shape
        self.bias: Tensor | None = None

    def parts(self) -> dict[str, Tensor]:
        return self._parts

    def dequantize(self, begin: int, end: int) -> Tensor:
        return dequantize(self.type_name, self._parts["blocks"][begin:end])


@pytest.mark.parametrize("name", sorted(repack._GGML))
def test_every_ggml_type(name: str) -> None:
    rows, depth = 20, 512 if TYPES[name].block_size == 256 else 3 * TYPES[name].block_size
    blocks = ggml_blocks(name, rows, depth)
    linear = make_linear(Stored(name, {"blocks": blocks}, (rows, depth)))
    assert name in linear.detail
    x = tokens(3, depth)
    assert error(linear(x), x.double().cpu() @ dequantize(name, blocks).double().T) < ERROR


SCHEMES = [
    Scheme("int", 4, 32, symmetric=False),
    Scheme("int", 4, 128),
    Scheme("int", 3, 32),
    Scheme("int", 4, 0),
    Scheme("int", 8, 64),
    Scheme("e2m1", 4, 16),
    Scheme("e4m3", 8, 32),
    Scheme("nf4", 4, 64),
    Scheme("e4m3", 8, 0, activations="fp8_token"),
    Scheme("e4m3", 8, 0, 0, activations="fp8_static"),
    Scheme("int", 8, 0, activations="int8_token"),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_neutral_scheme(scheme: Scheme) -> None:
    rows, depth = 24, 256
    codes = torch.randint(0, 120 if scheme.element == "e4m3" else 2**scheme.bits, (rows, depth), dtype=torch.uint8)
    shape = (rows if scheme.block_rows else 1, depth // scheme.group_size if scheme.group_size else 1)
    scales = torch.rand(shape) + 0.1
    zeros = None if scheme.symmetric else torch.randint(0, 15, shape).float()
    matrix = QuantizedMatrix(scheme, codes, scales, zeros, input_scale=0.01)
    linear = from_quantized(matrix, None, DEVICE)
    x = tokens(2, depth)
    wanted = x.double().cpu() @ matrix.dequantize().double().T
    assert error(linear(x), wanted) < (ERROR if scheme.activations == "none" else FLOAT8_ERROR)
    assert linear.activations == ("" if scheme.activations == "none" else scheme.activations.split("_")[0])


def test_an_input_rounding_without_a_kernel_is_declined() -> None:
    scheme = Scheme("e4m3", 8, 64, 64, activations="fp8_group128")
    matrix = QuantizedMatrix(scheme, torch.zeros(128, 128, dtype=torch.uint8), torch.ones(2, 2))
    with pytest.raises(Declined, match="fp8_group128"):
        from_quantized(matrix, None, DEVICE)


@pytest.mark.parametrize(("scheme", "limit"), [("fp8", 1.6 * FLOAT8_ERROR), ("int8", 0.02), ("int4", 0.2)])
def test_rounding_at_load(scheme: str, limit: float) -> None:
    values, x = torch.randn(48, 256), tokens(2, 256)
    linear: GpuLinear = quantize_at_load(values.to(DEVICE), None, scheme, 64)
    assert error(linear(x), x.double().cpu() @ values.double().T) < limit
    assert linear.nbytes < 48 * 256 * {"fp8": 1.1, "int8": 1.1, "int4": 0.6}[scheme]


def test_plans_are_kept_between_processes(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("TOKENMILL_TUNING", str(tmp_path / "plans.json"))
    times = {plan: number for number, plan in enumerate(reversed(candidates("int4", 4096, 4096, 16)))}
    monkeypatch.setattr("tokenmill.kernels.triton.matmul.choose.time_call", lambda call: call())
    table = PlanTable(DEVICE)
    assert table.plan("int4", 4096, 4096, 16) == rule("int4", 4096, 4096, 16)
    best = table.measure("int4", 4096, 4096, 16, lambda plan: times[plan])  # type: ignore[arg-type,return-value]
    assert times[best] == 0
    assert PlanTable(DEVICE).plan("int4", 4096, 4096, 13) == best, "the same bucket"
