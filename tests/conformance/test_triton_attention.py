"""Triton's paged attention against its float64 twin: decode, prefill, mixed steps, windows, FP8, shared prefixes."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU: test_triton.py runs this file under the interpreter", allow_module_level=True)

from tests.interpreter import slow_interpreted
from tokenmill.kernels.triton.attention.dense import SharedPrefixes, paged_attention
from tokenmill.kernels.triton.attention.fp8_widening import distinct_pages

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = 16
ERROR = 5e-3  # bf16 in and out; FP8 pages are exact once stored


@dataclass
class Step:
    """A batch over random pages, with NaN wherever nothing may be read."""

    counts: list[int]
    lengths: list[int]
    kv_heads: int = 2
    group: int = 4
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    shared: int = 0  # tokens that all sequences have in common
    runs: tuple[tuple[int, int, int], ...] = ()  # sequences [first, past) that have so many tokens in common
    window: int = 0
    cap: float = 0.0
    shared_pages: int = 0  # that all tables begin with, in steps of any kind
    widened: bool = False  # FP8 pages are widened before the launch
    has_sinks: bool = False  # a logit of each head joins the softmax
    computed: torch.dtype = torch.bfloat16  # queries and results

    def __post_init__(self) -> None:
        pages = [-(-length // PAGE) for length in self.lengths]
        shape = (sum(pages) + 2, self.kv_heads, PAGE, self.dim)
        self.k, self.v = (torch.randn(shape).to(self.dtype) for _ in range(2))
        order = torch.randperm(sum(pages)).int().split(pages)
        self.table = torch.full((len(pages), max(pages)), -1, dtype=torch.int32)
        for row, ids in enumerate(order):
            self.table[row, : len(ids)] = ids
            common = max(self.shared // PAGE, self.shared_pages)
            self.table[row, :common] = order[0][:common]
            for first, past, tokens in self.runs:
                if first <= row < past:
                    self.table[row, : tokens // PAGE] = order[first][: tokens // PAGE]
            self._poison(row)
        self.scales = (torch.rand(self.kv_heads) + 0.5, torch.rand(self.kv_heads) + 0.5)
        self.sinks = torch.randn(self.kv_heads * self.group) * 3 if self.has_sinks else None
        self.q = torch.randn(sum(self.counts), self.kv_heads * self.group * self.dim).to(self.computed)

    def _poison(self, row: int) -> None:
        length = self.lengths[row]
        if self.dtype != torch.float8_e4m3fn and length % PAGE:
            for pages in (self.k, self.v):
                pages[int(self.table[row, length // PAGE]), :, length % PAGE :] = float("nan")
        if self.window:  # pages that have left every token's window are given back
            gone = max(0, length - self.counts[row] - self.window + 1) // PAGE
            self.table[row, :gone] = -1

    def run(self) -> Tensor:
        starts = torch.tensor([0, *torch.tensor(self.counts).cumsum(0).tolist()], dtype=torch.int32)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        quantized = self.dtype == torch.float8_e4m3fn
        shared = None
        if self.shared or self.runs:
            shared = prefixes(self.runs or ((0, len(self.counts), self.shared),), len(self.counts))
        moved = (each.to(DEVICE) for each in (self.q, self.k, self.v, self.table, starts, lengths))
        out = torch.full_like(self.q, float("nan")).to(DEVICE)
        return paged_attention(
            *moved, self.dim**-0.5, self.window, self.cap,
            scales=tuple(each.to(DEVICE) for each in self.scales) if quantized else None,  # type: ignore[arg-type]
            sinks=None if self.sinks is None else self.sinks.to(DEVICE), shared=shared, out=out,
            distinct=distinct_pages(self.table.to(DEVICE), starts, PAGE) if self.widened else None,
        ).cpu()  # fmt: skip

    def twin(self) -> Tensor:
        """Token by token in float64."""
        quantized = self.dtype == torch.float8_e4m3fn
        out, token = torch.zeros(self.q.shape, dtype=torch.float64), 0
        for row, (count, length) in enumerate(zip(self.counts, self.lengths, strict=True)):
            for position in range(length - count, length):
                first = max(0, position - self.window + 1) if self.window else 0
                keys = torch.arange(first, position + 1)
                place = self.table[row, keys // PAGE].long(), slice(None), keys % PAGE
                k, v = self.k[place].double(), self.v[place].double()  # [keys, kv_heads, dim]
                if quantized:
                    k, v = k * self.scales[0][None, :, None], v * self.scales[1][None, :, None]
                q = self.q[token].double().view(self.kv_heads, self.group, self.dim)
                scores = torch.einsum("hgd,khd->hgk", q, k) * self.dim**-0.5
                if self.cap:
                    scores = torch.tanh(scores / self.cap) * self.cap
                if self.sinks is not None:
                    sinks = self.sinks.double().view(self.kv_heads, self.group, 1)
                    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
                else:
                    weights = scores.softmax(-1)
                out[token] = torch.einsum("hgk,khd->hgd", weights, v).reshape(-1)
                token += 1
        return out


def prefixes(runs: tuple[tuple[int, int, int], ...], sequences: int, places: int = 4) -> SharedPrefixes:
    """`places`: entries of several runs, some of which are not there."""
    tokens = torch.zeros(sequences, dtype=torch.int32)
    for first, past, common in runs:
        tokens[first:past] = common
    missing = [(1 << 30, 0, 0)] * (places - len(runs) if len(runs) > 1 else 0)
    entries = torch.tensor([*runs, *missing], dtype=torch.int32)
    return SharedPrefixes(entries.to(DEVICE), tokens.to(DEVICE), max(64, *(run[2] for run in runs)))


def check(step: Step) -> None:
    got, wanted = step.run(), step.twin()
    assert not got.isnan().any(), "a row was not written, or something outside was read"
    assert got.dtype == step.computed
    assert float((got.double() - wanted).norm() / wanted.norm()) < ERROR


FLOAT8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "group", "dim"),
    [
        (torch.bfloat16, 2, 4, 64),
        (torch.float16, 1, 3, 40),
        (FLOAT8, 2, 3, 40),
        (FLOAT8, 1, 8, 128),
        (torch.bfloat16, 3, 1, 80),
    ],
)
def test_decode(dtype: torch.dtype, kv_heads: int, group: int, dim: int) -> None:
    check(Step([1, 1, 1], [33, 1, 300], kv_heads, group, dim, dtype))


@pytest.mark.parametrize(
    ("dtype", "window", "cap"),
    [
        (torch.bfloat16, 0, 0.0),
        (torch.bfloat16, 9, 0.0),
        (FLOAT8, 70, 0.0),
        (torch.bfloat16, 70, 20.0),
        (FLOAT8, 0, 20.0),
    ],
)
def test_mixed_step(dtype: torch.dtype, window: int, cap: float) -> None:
    check(Step([1, 5, 40, 1, 17], [133, 5, 90, 1, 60], window=window, cap=cap, dtype=dtype))


@pytest.mark.parametrize(
    "step",
    [
        Step([1, 1, 1], [33, 1, 300], 1, 8, 64, has_sinks=True),
        Step([1, 1, 1], [33, 1, 300], 2, 3, 40, FLOAT8, has_sinks=True),
        Step([1, 5, 40, 1], [133, 5, 90, 1], window=9, has_sinks=True),
        Step([1, 5, 40, 1], [133, 5, 90, 1], dtype=FLOAT8, has_sinks=True),
        Step([1] * 3, [73, 64, 97], shared=48, has_sinks=True),
    ],
    ids=["decode", "decode fp8", "windowed mixed", "mixed fp8", "shared prefix"],
)
def test_sinks(step: Step) -> None:
    check(step)


HALF = torch.float16


@pytest.mark.parametrize(
    "step",
    [
        Step([1, 1, 1], [33, 1, 300], 1, 8, 64, HALF, computed=HALF),
        Step([1, 5, 40, 1], [133, 5, 90, 1], dtype=HALF, window=30, cap=20.0, computed=HALF),
        Step([1, 5, 40, 1, 17], [133, 69, 114, 65, 90], dtype=FLOAT8, shared_pages=4, widened=True, computed=HALF),
        Step([1] * 4, [333, 290, 257, 304], dtype=HALF, shared=256, computed=HALF),
        Step([1] * 3, [73, 64, 97], dtype=FLOAT8, shared=48, computed=HALF),
        Step([1, 9], [73, 64], dtype=torch.bfloat16, computed=HALF),
    ],
    ids=["decode", "windowed mixed", "mixed widened", "shared prefix", "shared prefix fp8", "bf16 pages"],
)
def test_float16(step: Step) -> None:
    check(step)


@pytest.mark.parametrize("window", [0, 30])
def test_pages_widened_beforehand(window: int) -> None:
    check(Step([1, 5, 40, 1, 17], [133, 69, 114, 65, 90], dtype=FLOAT8, shared_pages=4, widened=True, window=window))


@pytest.mark.parametrize("group", [1, 3])
def test_prefill_in_blocks_of_any_group(group: int) -> None:
    check(Step([50, 3], [50, 130], 1, group, 64))


def test_decode_with_a_window() -> None:
    check(Step([1, 1], [300, 20], window=33))


@pytest.mark.parametrize(
    ("dtype", "shared"),
    [pytest.param(torch.bfloat16, 256, marks=slow_interpreted), (torch.bfloat16, 16), (FLOAT8, 240)],
)
def test_shared_prefix_is_the_same_attention(dtype: torch.dtype, shared: int) -> None:
    check(Step([1] * 4, [333, 290, 257, 304], shared=shared, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "group", "dim"),
    [
        (torch.bfloat16, 3, 64),
        pytest.param(FLOAT8, 4, 40, marks=slow_interpreted),
        pytest.param(torch.float16, 1, 80, marks=slow_interpreted),
        pytest.param(FLOAT8, 4, 128, marks=slow_interpreted),
    ],
)
def test_several_shared_prefixes_in_one_step(dtype: torch.dtype, group: int, dim: int) -> None:
    """Rows without one before, between and after; a run longer than a block of rows."""
    runs = ((1, 3, 48), (4, 34, 112), (34, 36, 160))
    lengths = [20, 60, 49, 33, *(113 + 7 * n % 50 for n in range(30)), 161, 200, 90]
    check(Step([1] * 37, lengths, 1, group, dim, dtype, runs=runs))


@pytest.mark.parametrize(
    ("group", "dim"),
    [(3, 64), pytest.param(4, 128, marks=slow_interpreted), pytest.param(7, 128, marks=slow_interpreted)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, FLOAT8, pytest.param(HALF, marks=slow_interpreted)])
def test_long_prompts(group: int, dim: int, dtype: torch.dtype) -> None:
    """Several tiles of keys and of rows, on Hopper by a kernel of its own."""
    step = Step([70, 1, 200, 9], [70, 400, 650, 300], 2, group, dim, dtype, shared_pages=4, widened=dtype == FLOAT8)
    step = replace(step, computed=HALF) if dtype == HALF else step
    check(step)


@pytest.mark.parametrize(("group", "dim", "shared"), [(3, 64, 1024), pytest.param(4, 128, 656, marks=slow_interpreted)])
def test_a_long_shared_prefix(group: int, dim: int, shared: int) -> None:
    lengths = [shared + 1 + 13 * number % 90 for number in range(40)]
    check(Step([1] * 40, lengths, 1, group, dim, torch.bfloat16, shared=shared))


def test_a_launch_for_a_shared_prefix_is_right_without_one() -> None:
    step = Step([1, 1, 1], [40, 100, 7])
    starts, lengths = torch.arange(4, dtype=torch.int32), torch.tensor(step.lengths, dtype=torch.int32)
    nothing = ((0, 0, 0),)
    for shared in (prefixes(runs, 3) for runs in (nothing, ((0, 3, 0),), nothing * 4, ((1 << 30, 0, 0),) * 4)):
        moved = (each.to(DEVICE) for each in (step.q, step.k, step.v, step.table, starts, lengths))
        got = paged_attention(*moved, step.dim**-0.5, shared=shared).cpu()
        wanted = step.twin()
        assert float((got.double() - wanted).norm() / wanted.norm()) < ERROR
