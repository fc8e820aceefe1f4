"""W4A8 on a GPU: every kernel gives the rounded input times the exact weights, as kernels/rounding.py has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU: test_triton.py runs this file under the interpreter", allow_module_level=True)

from tests.interpreter import slow_interpreted
from tests.quantized_files import save_quantized
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.kernels.base import Declined
from tokenmill.kernels.rounding import round_input
from tokenmill.kernels.triton.fused.elementwise import quantize_rows
from tokenmill.kernels.triton.matmul import choose, repack
from tokenmill.kernels.triton.matmul.choose import GEMV, GROUPED, GROUPED_FP8, HOPPER, LIBRARY, Plan, Tiling
from tokenmill.kernels.triton.matmul.grouped_fp8 import UNIT, grouped_fp8, unpack_text
from tokenmill.kernels.triton.matmul.joined import expand_small, join_linears
from tokenmill.kernels.triton.matmul.make import from_quantized, quantize_at_load
from tokenmill.kernels.triton.matmul.w4a8 import RoundedGroupedLinear
from tokenmill.kernels.triton.shared.launch import on_hopper
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.model.loader import load_model

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
ERROR = 2e-3  # sums of FP8 tensor cores keep some 14 bits; the result is float32
SIXTEEN_BITS = 6e-3  # where weights and inputs are bf16


def error(got: Tensor, wanted: Tensor) -> float:
    assert not got.isnan().any()
    return float((got.double().cpu() - wanted.double().cpu()).norm() / wanted.double().cpu().norm())


def matrix(rows: int, depth: int, group: int, affine: bool) -> tuple[RoundedGroupedLinear, Tensor]:
    """All 16 codes, zero points that are no whole numbers, and what they mean in float64."""
    codes = torch.randint(-8, 8, (rows, depth), dtype=torch.int8)
    scales = torch.rand(rows, depth // group) + 0.1
    zeros = torch.randn(scales.shape).bfloat16().float() * 3 if affine else None
    moved = None if zeros is None else zeros.to(DEVICE)
    weight = repack.pack_groups(codes.to(DEVICE), scales.to(DEVICE), moved, 4)
    kept = 0.0 if weight.zeros is None else weight.zeros.t()[:, : depth // group].cpu().double()
    spread = kept if isinstance(kept, float) else kept.repeat_interleave(group, 1)
    relative = weight.scales.t()[:, : depth // group].cpu().double() * weight.row_scale[:, None].cpu().double()
    exact = (codes.double() - spread) * relative.repeat_interleave(group, 1)
    return RoundedGroupedLinear(weight, torch.linspace(-1, 1, rows), ""), exact


def inputs(count: int, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and what they mean; some inputs are far larger than the others."""
    x = torch.randn(count, depth).to(DEVICE)
    x[:, ::37] *= 30
    codes, scales = quantize_rows(x, "fp8")
    return codes, scales, codes.double().cpu() * scales.double().cpu()[:, None]


@pytest.mark.parametrize(
    ("group", "affine", "rows", "depth"),
    [
        (128, False, 72, 640),  # rows beyond the last tile, depth beyond the last block
        (64, False, 64, 512),
        (32, False, 40, 288),
        (128, True, 72, 640),
        (32, True, 48, 256),
    ],
)
@pytest.mark.parametrize("count", [1, 16, 65, pytest.param(256, marks=slow_interpreted)])
def test_products_in_float8(count: int, group: int, affine: bool, rows: int, depth: int) -> None:
    linear, exact = matrix(rows, depth, group, affine)
    codes, scales, x = inputs(count, depth)
    wanted = x @ exact.T + torch.linspace(-1, 1, rows).double()
    for tiling in (Tiling(64, 0, 1, 4, 3, 2, 64), Tiling(64, 0, 2, 4, 3), Tiling(128, 0, 0, 8, 3)):
        got = linear.multiply_quantized(codes, scales, torch.float32, Plan(GROUPED_FP8, tiling))
        assert error(got, wanted) < ERROR, tiling
        again = linear.multiply_quantized(codes, scales, torch.float32, Plan(GROUPED_FP8, tiling))
        assert torch.equal(got, again), "counters are left as they were"


@pytest.mark.parametrize("count", [1, 5, 33])
@pytest.mark.parametrize(("group", "affine"), [(128, False), (32, True)])
def test_few_tokens_in_sixteen_bits(count: int, group: int, affine: bool) -> None:
    linear, exact = matrix(44, 640, group, affine)
    codes, scales, x = inputs(count, 640)
    wanted = x @ exact.T + torch.linspace(-1, 1, 44).double()
    plans = [Plan(GROUPED, Tiling(16, 0, 2, 4, 2, 0, 64)), *([Plan(GEMV, Tiling(4, warps=4))] if count == 1 else [])]
    for plan in plans:
        assert error(linear.multiply_quantized(codes, scales, torch.float32, plan), wanted) < SIXTEEN_BITS
        if count < 33:
            gated = torch.nn.functional.silu(wanted[:, :22]) * wanted[:, 22:]
            got = linear.multiply_quantized(codes, scales, torch.float32, plan, gated=True)
            assert error(got, gated) < 2 * SIXTEEN_BITS


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("kernel", [LIBRARY, HOPPER])
def test_many_tokens_by_other_kernels(kernel: str, group: int) -> None:
    if kernel == HOPPER and not on_hopper():
        pytest.skip("needs a Hopper GPU")
    linear, exact = matrix(512, 1024, group or 1024, False)
    codes, scales, x = inputs(128, 1024)
    wanted = x @ exact.T + torch.linspace(-1, 1, 512).double()
    assert linear.kind == ("w4a8" if group else "w4a8row")
    got = linear.multiply_quantized(codes, scales, torch.bfloat16, Plan(kernel))
    assert error(got, wanted) < SIXTEEN_BITS


def run_assembly(text: str, inputs: list[int], outputs: int) -> list[int]:
    """What some instructions of PTX on 32-bit registers do; $0 ... are the outputs, then come the inputs."""
    registers = {f"${outputs + number}": value for number, value in enumerate(inputs)}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in text.strip("{} ").split("; "):
        name, *arguments = line.strip("; ").replace(",", "").split()
        if not name or name.startswith(".reg"):
            continue
        target, (a, b, c, table) = arguments[0], ([value(each) for each in arguments[1:]] + [0, 0, 0])[:4]
        results: dict[str, int] = {
            "mov.b32": a,
            "shr.u32": a >> min(b, 31),
            "mul.lo.u32": a * b,
            "add.u32": a + b,
            "prmt.b32": sum(((a | b << 32) >> 8 * (c >> 4 * i & 7) & 255) << 8 * i for i in range(4)),
            "lop3.b32": sum(
                (table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32)
            ),
        }
        registers[target] = results[name] & 0xFFFFFFFF
    return [registers[f"${number}"] for number in range(outputs)]


def test_the_assembly_that_unpacks_makes_float8_of_nibbles() -> None:
    """The interpreter does not run it, so its instructions are followed here."""
    words = torch.randint(0, 1 << 32, (64, 4), dtype=torch.int64)
    words[0] = torch.tensor([0x76543210, 0xFEDCBA98, 0, 0xFFFFFFFF])
    got = [run_assembly(unpack_text(), row, 8) for row in words.tolist()]
    values = torch.tensor(got, dtype=torch.int64).to(torch.int32).view(torch.float8_e4m3fn).float() * UNIT
    nibbles = (words[:, None, :] >> 4 * torch.arange(8)[:, None]) & 15  # [row, nibble, word]
    assert torch.equal(values.view(64, 8, 4), nibbles.float() - 8)


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme("int", 4, 32, activations="fp8_token"),
        Scheme("int", 4, 128, activations="fp8_token"),
        Scheme("int", 4, 0, activations="fp8_token"),
        Scheme("int", 4, 64, symmetric=False, activations="fp8_static"),
        Scheme("int", 3, 64, activations="fp8_token"),
        Scheme("int", 8, 64, activations="fp8_token"),
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [2, 40])
def test_stored_schemes_round_their_input(scheme: Scheme, count: int) -> None:
    rows, depth = 32, 256
    shape = (rows, depth // (scheme.group_size or depth))
    codes = torch.randint(0, 2**scheme.bits, (rows, depth), dtype=torch.uint8)
    zeros = None if scheme.symmetric else torch.randint(0, 15, shape).float()
    fixed = 0.02 if scheme.activations == "fp8_static" else None
    stored = QuantizedMatrix(scheme, codes, torch.rand(shape) + 0.1, zeros, input_scale=fixed)
    linear = from_quantized(stored, None, DEVICE)
    assert isinstance(linear, RoundedGroupedLinear)
    assert linear.input_scale == (fixed or 0.0)
    x = torch.randn(count, depth)
    wanted = round_input(x, scheme.activations, fixed).double() @ stored.dequantize().double().T
    # The interpreter cuts off where a float8 is rounded.
    assert error(linear(x.to(DEVICE)), wanted) < (SIXTEEN_BITS if ON_GPU else 0.14)


def test_uneven_groups_are_declined() -> None:
    scheme = Scheme("int", 4, 24, activations="fp8_token")
    stored = QuantizedMatrix(scheme, torch.zeros(8, 48, dtype=torch.uint8), torch.ones(8, 2))
    with pytest.raises(Declined, match="groups of 24"):
        from_quantized(stored, None, DEVICE)


def test_parts_are_joined_and_stay_rounded() -> None:
    parts = [matrix(rows, 256, 64, False)[0] for rows in (48, 16)]
    assert expand_small(parts) == parts, "16-bit floats would not round their input"
    x = torch.randn(5, 256).to(DEVICE)
    joined = join_linears(parts)
    assert isinstance(joined, RoundedGroupedLinear)
    assert joined.takes_codes(1)
    assert error(joined(x), torch.cat([part(x) for part in parts], 1)) < 1e-6
    parts[1].input_scale = 0.5
    assert join_linears(parts) is None


def test_a_written_file_runs_on_these_kernels(tmp_path: Path) -> None:
    save_quantized(tmp_path, "compressed-tensors", Scheme("int", 4, 32, activations="fp8_token"), "llama")
    model = load_model(open_checkpoint(tmp_path), DEVICE, 64, "triton")
    kernel = model.weights["model.layers.0.mlp.down_proj"].kernel
    assert kernel is not None
    assert isinstance(kernel.run, RoundedGroupedLinear), kernel


def test_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "INTERPRETED", False)
    monkeypatch.setattr(choose, "on_hopper", lambda: True)
    kernels = {kind: [choose.rule(kind, 4096, 4096, n).kernel for n in (1, 32, 33, 128, 4096)] for kind in choose.W4A8}
    assert kernels["w4a8"] == [GEMV, GROUPED, GROUPED_FP8, GROUPED_FP8, GROUPED_FP8]
    assert kernels["w4a8row"] == [GEMV, GROUPED, GROUPED_FP8, GROUPED_FP8, LIBRARY]
    assert kernels["w4a8g32"] == [GEMV, GROUPED, GROUPED, GROUPED, LIBRARY]
    for tokens in (1, 64, 128, 256, 4096):
        measured = {plan.kernel for plan in choose.candidates("w4a8", 4096, 4096, tokens)}
        assert {GROUPED_FP8, GROUPED} <= measured
        assert (LIBRARY in measured) == (tokens > 64)
    assert not choose.fuses_gate(Plan(GROUPED_FP8), 512, 64)


def test_rounding_at_load() -> None:
    values, x = torch.randn(48, 256), torch.randn(40, 256).to(DEVICE)
    linear = quantize_at_load(values.to(DEVICE), None, "w4a8", 64)
    assert isinstance(linear, RoundedGroupedLinear)
    assert error(linear(x), x.double().cpu() @ values.double().T) < 0.2
    codes, scales = quantize_rows(x, "fp8")
    assert error(grouped_fp8(codes, scales, linear.weight), linear(x)) < 1e-2
