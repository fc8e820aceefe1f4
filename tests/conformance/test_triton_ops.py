"""Triton's small ops and sampling against float64 twins: every op of the table, the fused forms, every draw."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU: test_triton.py runs this file under the interpreter", allow_module_level=True)

from tests.conformance.test_backends import CASES
from tests.interpreter import slow_interpreted
from tokenmill.kernels import ref
from tokenmill.kernels import triton as gpu
from tokenmill.kernels.triton.step.thresholds import search

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOAT8_ERROR = 0.04 if torch.cuda.is_available() else 0.2  # likewise, three bits of mantissa
BF16_ERROR = 5e-3  # one rounding to bf16 (the interpreter cuts off instead of rounding)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def error(got: Tensor, wanted: Tensor) -> float:
    assert not got.isnan().any()
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("op", sorted(op for op in CASES if gpu.find_op(op)))  # torch runs the others in one kernel
def test_op_equals_its_spec_in_float32(op: str) -> None:
    for make in CASES[op]:
        spec = [each.to(DEVICE) if isinstance(each, Tensor) else each for each in make()]
        given = [each.clone() if isinstance(each, Tensor) else each for each in spec]
        wanted, got = getattr(ref, op)(*spec), gpu.find_op(op)(*given)
        if wanted is None:
            wanted, got = spec[1], given[1]
        pairs = zip(wanted, got, strict=True) if isinstance(wanted, tuple) else [(wanted, got)]
        for left, right in pairs:
            loose = left.dtype in (torch.float16, torch.bfloat16)  # the interpreter cuts off instead of rounding
            torch.testing.assert_close(right, left, rtol=1e-2 if loose else 1e-4, atol=5e-5)


@pytest.mark.parametrize("width", [64, 577])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_norm_and_gate_with_an_8_bit_copy(width: int, kind: str) -> None:
    x, y, weight = random(3, width), random(3, width), torch.rand(width, device=DEVICE) + 0.5
    total, codes, scales = gpu.add_rms_norm_quantized(x, y, weight, 1e-5, kind)
    sum64 = x.double() + y.double()
    normed = ref.rms_norm(sum64, weight.double(), 1e-5)
    assert error(total, sum64) < BF16_ERROR
    step = FLOAT8_ERROR if kind == "fp8" else 0.03
    assert error(codes.double() * scales[:, None].double(), normed) < step
    both = random(3, 2 * width)
    codes, scales = gpu.gated_quantized(both[:, :width], both[:, width:], "silu", kind)
    wanted = ref.gated(both[:, :width].double(), both[:, width:].double(), "silu")
    assert error(codes.double() * scales[:, None].double(), wanted) < step
    limit = 448.0 if kind == "fp8" else 127.0
    torch.testing.assert_close(scales.double(), wanted.abs().amax(1) / limit, rtol=1e-2, atol=0)
    _, scales = gpu.quantize_rows(x, kind, 0.125)
    assert (scales == 0.125).all()


def test_embedding_rows() -> None:
    table, ids = random(50, 70), torch.tensor([3, 49, 0, 3], device=DEVICE)
    assert error(gpu.embed(ids, table, 2.5), table[ids].double() * 2.5) < BF16_ERROR


@pytest.mark.parametrize(("interleaved", "normed"), [(False, False), (True, True)])
@pytest.mark.parametrize(
    ("pages_dtype", "pairs"), [(torch.bfloat16, 12), (torch.float8_e4m3fn, 4), (torch.bfloat16, 0)]
)
def test_rope_store_is_norm_rope_and_store(
    interleaved: bool, normed: bool, pages_dtype: torch.dtype, pairs: int
) -> None:
    """`pairs`: how many of a head's 12 are rotated."""
    q_heads, kv_heads, dim, tokens = 6, 2, 24, 5
    qkv = random(tokens, (q_heads + 2 * kv_heads) * dim)
    positions, slots = torch.tensor([0, 3, 7, 1, 2]), torch.tensor([5, -1, 16, 17, 40])  # -1: a padding row
    angles = torch.outer(torch.arange(8.0), torch.rand(pairs))
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    norms = (torch.rand(dim, device=DEVICE) + 0.5, torch.rand(dim, device=DEVICE) + 0.5) if normed else None
    k_pages = torch.zeros(3, kv_heads, 16, dim, dtype=pages_dtype, device=DEVICE)
    v_pages = torch.zeros_like(k_pages)
    quantized = pages_dtype == torch.float8_e4m3fn
    scales = (
        (torch.rand(kv_heads, device=DEVICE) + 0.5, torch.rand(kv_heads, device=DEVICE) + 0.5) if quantized else None
    )
    q = gpu.rope_store(
        qkv, q_heads, k_pages, v_pages, positions.to(DEVICE), slots.to(DEVICE), cos, sin, interleaved,
        norms=norms, eps=1e-6, scales=scales,
    )  # fmt: skip
    wide = qkv.double().cpu().split([q_heads * dim, kv_heads * dim, kv_heads * dim], 1)
    q64, k64 = wide[0].contiguous(), wide[1].contiguous()
    if norms is not None:
        q64 = ref.rms_norm(q64, norms[0].double().cpu(), 1e-6, dim)
        k64 = ref.rms_norm(k64, norms[1].double().cpu(), 1e-6, dim)
    tables = (cos.double().cpu(), sin.double().cpu())
    q64, k64 = (ref.rope(each, positions, *tables, dim, interleaved) for each in (q64, k64))
    assert error(q.cpu(), q64) < BF16_ERROR
    for pages, wanted, scale in ((k_pages, k64, 0), (v_pages, wide[2], 1)):
        factor = scales[scale].double().cpu() if scales is not None else torch.ones(kv_heads).double()
        stored = pages.double().cpu() * factor[None, :, None, None]
        kept = slots >= 0
        found = stored[slots[kept] // 16, :, slots[kept] % 16]
        assert error(found, wanted.view(tokens, kv_heads, dim)[kept]) < (FLOAT8_ERROR if quantized else BF16_ERROR)
        stored[slots[kept] // 16, :, slots[kept] % 16] = 0
        assert (stored == 0).all(), "something was written outside the slots"


def rows(count: int, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> gpu.SamplingTensors:
    return gpu.SamplingTensors(
        torch.full((count,), temperature, device=DEVICE),
        torch.full((count,), top_k, dtype=torch.int32, device=DEVICE),
        torch.full((count,), top_p, device=DEVICE),
        torch.full((count,), min_p, device=DEVICE),
        torch.tensor([gpu.mix_seed(7, index) for index in range(count)], device=DEVICE),
        torch.arange(count, device=DEVICE),
    )


def allowed(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that may be drawn: filters in order, each on what the one before left."""
    values, ids = (logits.double() / temperature).softmax(-1).sort(descending=True)
    if top_k:
        values, ids = values[:top_k], ids[:top_k]
    if top_p < 1:
        count = int((values.cumsum(0) / values.sum() < top_p).sum()) + 1
        values, ids = values[:count], ids[:count]
    return set(ids[values >= min_p * values[0]].tolist())


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.3, 5, 1.0, 0.0), (1.3, 0, 0.6, 0.0), (1.0, 0, 1.0, 0.2), (0.9, 20, 0.8, 0.05)],
)
def test_draws_come_from_the_kept_tokens(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(3)).to(DEVICE) * 2
    kept = allowed(logits[0].cpu(), temperature, top_k, top_p, min_p)
    count = 8
    ids = gpu.sample(logits.expand(count, -1).contiguous(), rows(count, temperature, top_k, top_p, min_p)).tolist()
    assert set(ids) <= kept
    assert len(kept) == 1 or len(set(ids)) > 1, "eight draws from several tokens gave one"


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=slow_interpreted)])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])  # flat rows are read again for every bit, peaked ones are held
def test_thresholds_of_large_rows_keep_what_the_filters_keep(spread: float, dtype: torch.dtype) -> None:
    logits = (torch.randn(7, 9001, generator=torch.Generator().manual_seed(5)) * spread).to(DEVICE, dtype)
    logits[5] = logits[5].round()  # ties, across the limit too
    logits[6, :8990] = float("-inf")  # a mask that leaves fewer than top-k
    cases = [
        (50, 1.0, 0.0),
        (50, 0.9, 0.0),
        (0, 0.7, 0.0),
        (0, 1.0, 0.1),
        (400, 0.9, 0.01),
        (40, 0.8, 0.0),
        (30, 1.0, 0.0),
    ]
    k, p, least = (torch.tensor(each, device=DEVICE) for each in zip(*cases, strict=True))
    found = search(logits, torch.full((7,), 0.8, device=DEVICE), k.int(), p, least)
    for row, (threshold, case) in enumerate(zip(found.cpu(), cases, strict=True)):
        values = logits[row].float().cpu()
        wanted = smallest_kept(values.double(), 0.8, *case)
        got = int((values >= threshold).sum())
        ties = int((values == wanted).sum()) if case[1] < 1 else 0  # float32 sums may end one value before or after
        assert abs(got - int((values >= wanted).sum())) <= max(ties, 1 if case[1] < 1 else 0), (row, got)


def smallest_kept(values: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> float:
    """As `allowed`, by value: what ties with the last one that a filter keeps stays."""
    best = values.sort(descending=True).values
    lowest = best[top_k - 1] if top_k else best[-1]
    weights = ((best[best >= lowest] - best[0]) / temperature).exp()
    if top_p < 1:
        lowest = best[int((weights.cumsum(0) < top_p * weights.sum()).sum())]
    return float(max(lowest, best[0] + temperature * math.log(min_p)) if min_p else lowest)


def test_frequencies_follow_the_distribution_and_draws_are_reproducible() -> None:
    count = 500 if torch.cuda.is_available() else 150
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]], device=DEVICE).expand(count, -1).contiguous()
    ids = gpu.sample(logits, rows(count, 0.8))
    frequency = torch.bincount(ids.cpu(), minlength=5).double() / count
    wanted = (logits[0].double().cpu() / 0.8).softmax(-1)
    assert float((frequency - wanted).abs().max()) < 4.5 * 0.5 / count**0.5
    again = gpu.sample(logits[:20].contiguous(), rows(20, 0.8))
    assert (again == ids[:20]).all(), "a row must draw the same token in any batch"


def test_greedy_rows_take_the_first_of_the_largest_across_chunks() -> None:
    logits = torch.randn(3, 9001, device=DEVICE)
    logits[0, 4097] = logits[0, 8200] = 50.0
    assert gpu.sample(logits, rows(3, 0.0)).tolist() == ref.argmax(logits).tolist() == gpu.argmax(logits).tolist()
    assert gpu.argmax(logits)[0] == 4097
