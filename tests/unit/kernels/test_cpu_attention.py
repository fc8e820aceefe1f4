"""Paged attention in C++ against its torch twin: odd lengths, windows, grouped heads, shared prefixes, page types."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels import cpu, ref

pytestmark = pytest.mark.skipif(
    cpu.unavailable(torch.device("cpu")) is not None, reason=str(cpu.unavailable(torch.device("cpu")))
)


class Case:
    """Random pages, and sequences given as (tokens of this step, stored tokens after it)."""

    def __init__(
        self,
        sequences: list[tuple[int, int]],
        heads: tuple[int, int] = (9, 3),
        head_dim: int = 64,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        shared_pages: int = 0,
        window: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(len(sequences) + head_dim + page_size)
        counts = [-(-length // page_size) for _, length in sequences]
        num_pages = sum(counts) + 1
        order = torch.randperm(num_pages, generator=generator).tolist()
        table = torch.full((len(sequences), max(counts)), -1, dtype=torch.int32)
        for number, (count, (new, length)) in enumerate(zip(counts, sequences, strict=True)):
            pages = [order.pop() for _ in range(count)]
            table[number, :count] = torch.tensor(pages, dtype=torch.int32)
            shared = min(shared_pages, (length - new) // page_size)
            table[number, :shared] = table[0, :shared]
            if window:
                table[number, : max(0, length - new - window + 1) // page_size] = -1
        # Strided in the first dimension, as one layer of a larger pool is.
        shape = (num_pages, 2, heads[1], page_size, head_dim)
        pool = torch.randn(shape, generator=generator).to(dtype)
        self.k, self.v = pool[:, 0], pool[:, 1]
        self.table = table
        self.starts = torch.tensor([0, *[new for new, _ in sequences]], dtype=torch.int32).cumsum(0).int()
        self.lengths = torch.tensor([length for _, length in sequences], dtype=torch.int32)
        self.q = torch.randn(int(self.starts[-1]), heads[0] * head_dim, generator=generator)
        self.window = window

    def check(self, scale: float = 0.125, cap: float = 0.0, tolerance: float = 5e-6) -> None:
        arguments = (self.k, self.v, self.table, self.starts, self.lengths, scale, self.window, cap)
        actual = cpu.attention(self.q, *arguments)
        torch.testing.assert_close(actual, ref.attention(self.q, *arguments), rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 700])
def test_one_token(length: int) -> None:
    Case([(1, length)]).check()


@pytest.mark.parametrize("new", [1, 2, 16, 17, 100])
def test_prefill_and_chunks(new: int) -> None:
    Case([(new, new)]).check()
    Case([(new, new + 333)]).check()


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 1), (12, 2), (9, 3), (64, 1)])
@pytest.mark.parametrize("head_dim", [8, 30, 128, 256])
def test_head_shapes(heads: tuple[int, int], head_dim: int) -> None:
    Case([(3, 40), (1, 90), (20, 20)], heads, head_dim).check(scale=head_dim**-0.5)


@pytest.mark.parametrize("page_size", [1, 8, 32, 100])
def test_page_sizes(page_size: int) -> None:
    Case([(5, 155), (1, 90), (70, 70)], page_size=page_size).check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_page_types(dtype: torch.dtype) -> None:
    case = Case([(5, 155), (1, 90), (70, 70)], dtype=dtype)
    in_halves = dtype == torch.float16 and cpu.multiplies_halves(case.k.shape[-1])
    case.check(tolerance=5e-3 if in_halves else 5e-6)


@pytest.mark.parametrize("window", [1, 5, 64, 512])
def test_sliding_window(window: int) -> None:
    Case([(1, 300), (40, 40), (9, 700)], window=window).check()


def test_softcap_and_large_scores() -> None:
    Case([(1, 300), (40, 40)]).check(cap=50.0)
    Case([(1, 300), (40, 40)]).check(scale=20.0, tolerance=1e-4)


@pytest.mark.parametrize("window", [0, 400])
def test_shared_prefix_is_read_once_and_changes_nothing(window: int) -> None:
    case = Case([(1, 210), (1, 350), (2, 200), (1, 20), (30, 260), (1, 211)], shared_pages=12, window=window)
    case.check()
    out = torch.empty_like(case.q)
    arguments = (case.q, case.k, case.v, case.table, case.starts, case.lengths, 0.125, window, 0.0, 0, None, out)
    assert cpu.module().attention(cpu.pool(), *arguments) == 128  # of 12 * 16: whole chunks only


def test_same_bits_whatever_the_threads() -> None:
    case = Case([(1, 900), (1, 350), (2, 200), (50, 260)], shared_pages=12)
    results = []
    for threads in (1, 2, 5):
        out = torch.empty_like(case.q)
        pool = cpu.module().Pool.shared(threads)
        arguments = (case.q, case.k, case.v, case.table, case.starts, case.lengths, 0.125, 0, 0.0, 0, None, out)
        cpu.module().attention(pool, *arguments)
        results.append(out)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(("window", "shared_pages"), [(0, 0), (0, 20), (70, 0), (400, 20)])
@pytest.mark.parametrize("page_size", [8, 16])
def test_same_bits_alone_in_a_batch_and_among_drafts(window: int, shared_pages: int, page_size: int) -> None:
    """A decode's sums run in one order: a draft's tokens, computed together, are those computed one by one."""
    sequences = [(5, 350), (1, 900), (9, 261), (1, 20), (3, 129), (2, 128), (17, 211), *[(1, 300)] * 9]
    case = Case(sequences, page_size=page_size, shared_pages=shared_pages, window=window)
    common = (0.125, window, 0.0)
    together = cpu.attention(case.q, case.k, case.v, case.table, case.starts, case.lengths, *common)
    row = 0
    for number, (new, length) in enumerate(sequences):
        for place in range(new):
            lengths = torch.tensor([length - new + place + 1], dtype=torch.int32)
            starts = torch.tensor([0, 1], dtype=torch.int32)
            table = case.table[number : number + 1].contiguous()
            alone = cpu.attention(case.q[row : row + 1], case.k, case.v, table, starts, lengths, *common)
            assert torch.equal(alone[0], together[row]), (number, place)
            row += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_store_matches_twin(dtype: torch.dtype) -> None:
    actual, expected = torch.zeros(7, 3, 4, 10, dtype=dtype), torch.zeros(7, 3, 4, 10, dtype=dtype)
    x = torch.cat([torch.randn(6, 30), torch.tensor([[1e6, -1e-7, 6e-5] * 10])])
    slots = torch.tensor([0, 27, 13, 5, 4, 9, 20])
    cpu.store_kv(x, actual, slots)
    ref.store_kv(x, expected, slots)
    assert torch.equal(actual, expected)


def test_bad_tables_are_refused() -> None:
    case = Case([(1, 100)])
    with pytest.raises(ValueError, match="too narrow"):
        cpu.attention(case.q, case.k, case.v, case.table[:, :2].contiguous(), case.starts, case.lengths, 1.0, 0, 0.0)
    case.table[0, 0] = 10_000
    with pytest.raises(ValueError, match="not there"):
        cpu.attention(case.q, case.k, case.v, case.table, case.starts, case.lengths, 1.0, 0, 0.0)
