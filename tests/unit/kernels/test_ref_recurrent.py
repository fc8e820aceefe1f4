"""Recurrent ops: chunks give what single steps give, for every split; a batch gives what its sequences give alone; the
C++ kernels give what the spec gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenmill.kernels import cpu, cpu_recurrent
from tokenmill.kernels import ref_recurrent as ref

_TOKENS = 150
_INNER, _STATES, _HEADS, _KEY_HEADS, _KEY, _VALUE = 24, 8, 6, 2, 8, 12


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _case(name: str, ref: Any = ref) -> tuple[tuple[Tensor, ...], tuple[int, ...], Callable[..., Tensor]]:
    """(rows of one sequence, shape of its state, the op on rows, states, slots and starts)."""
    t = _TOKENS
    if name == "convolve":
        inner = 64  # whole vectors: what torch computes of the rest of a tensor differs in the last bit
        weight, bias = _random(4, inner), _random(inner, seed=1)
        return (_random(t, inner, seed=2),), (3, inner), lambda *given: ref.convolve(*given, weight, bias)
    if name == "mamba_scan":
        a, d = -torch.exp(_random(_INNER, _STATES)), _random(_INNER, seed=1)
        rows = (_random(t, _INNER, seed=2), _random(t, _INNER, seed=3), _random(t, 8, seed=4), _random(t, 8, seed=5))
        return rows, (_INNER, _STATES), lambda *given: ref.mamba_scan(*given, a, d)
    if name == "mamba2_scan":
        a, d, bias = -torch.exp(_random(_HEADS)), _random(_HEADS, seed=1), _random(_HEADS, seed=2)
        rows = (_random(t, _INNER + 2 * 2 * _STATES, seed=3), _random(t, _HEADS, seed=4))
        shape = (_HEADS, _INNER // _HEADS, _STATES)
        return rows, shape, lambda *given: ref.mamba2_scan(*given, a, d, bias, 2, 1.3, (0.01, 2.0))
    a, bias = -torch.exp(_random(_HEADS)), _random(_HEADS, seed=1)
    width = 2 * _KEY_HEADS * _KEY + _HEADS * _VALUE
    rows = (_random(t, width, seed=2), _random(t, _HEADS, seed=3), _random(t, _HEADS, seed=4))
    return rows, (_HEADS, _KEY, _VALUE), lambda *given: ref.delta_scan(*given, a, bias, _KEY_HEADS)


_OPS = ["convolve", "mamba_scan", "mamba2_scan", "delta_scan"]


def _run(name: str, splits: list[int]) -> tuple[Tensor, Tensor]:
    rows, shape, op = _case(name)
    states = torch.full((3, *shape), 7.0)
    states[1] = _random(*shape, seed=9)
    outputs, begin = [], 0
    for count in splits:
        part = tuple(each[begin : begin + count] for each in rows)
        outputs.append(op(*part, states, torch.tensor([1]), torch.tensor([0, count])))
        begin += count
    assert begin == _TOKENS
    assert (states[[0, 2]] == 7.0).all(), "another sequence's state was written"
    return torch.cat(outputs), states[1]


@pytest.mark.parametrize("splits", [[150], [64, 86], [1, 2, 147], [100] + [1] * 50, [17] * 8 + [14], [63, 1, 65, 21]])
@pytest.mark.parametrize("name", _OPS)
def test_chunks_equal_single_steps(name: str, splits: list[int]) -> None:
    expected, expected_state = _run(name, [1] * _TOKENS)
    got, state = _run(name, splits)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(state, expected_state, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", _OPS)
def test_short_rows_equal_single_steps_bit_for_bit(name: str) -> None:
    """Drafts are computed in rows of a few tokens: what is kept of them must be what decoding gives."""
    expected, expected_state = _run(name, [1] * _TOKENS)
    got, state = _run(name, [5] * 30)
    assert torch.equal(got, expected)
    assert torch.equal(state, expected_state)


@pytest.mark.parametrize("lengths", [[1, 1, 1, 1], [1, 30, 1, 7], [70, 20], [1, 1, 40]])
@pytest.mark.parametrize("name", _OPS)
def test_sequences_of_a_batch_do_not_touch_each_other(name: str, lengths: list[int]) -> None:
    rows, shape, op = _case(name)
    total = sum(lengths)
    slots = torch.tensor([5, 2, 7, 0][: len(lengths)])
    starts = torch.tensor([0, *lengths]).cumsum(0)
    states = _random(8, *shape, seed=9)
    together = states.clone()
    got = op(*(each[:total] for each in rows), together, slots, starts)
    for number, slot in enumerate(slots.tolist()):
        begin, end = int(starts[number]), int(starts[number + 1])
        alone = states.clone()
        expected = op(*(each[begin:end] for each in rows), alone, torch.tensor([slot]), torch.tensor([0, end - begin]))
        torch.testing.assert_close(got[begin:end], expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(together[slot], alone[slot], rtol=1e-6, atol=1e-6)
    others = [slot for slot in range(8) if slot not in slots]
    assert torch.equal(together[others], states[others])


def test_a_strong_decay_neither_overflows_nor_divides_by_zero() -> None:
    rows, shape, _ = _case("mamba2_scan")
    a, zeros = torch.full((_HEADS,), -1e4), torch.zeros(_HEADS)
    arguments: tuple[Any, ...] = (torch.zeros(1, *shape), torch.tensor([0]), torch.tensor([0, _TOKENS]), a, zeros)
    y = ref.mamba2_scan(*rows, *arguments, zeros, 2)
    assert y.isfinite().all()


@pytest.mark.parametrize("norm_first", [True, False])
def test_gated_norm_of_groups(norm_first: bool) -> None:
    x, gate, weight = _random(5, 12), _random(5, 12, seed=1), _random(3, 4, seed=2)
    factor = torch.nn.functional.silu(gate * 0.5)
    y = ref.gated_norm(x, gate, weight, 1e-5, norm_first, 0.5)
    for group in range(3):
        cut = slice(4 * group, 4 * group + 4)
        inner = x[:, cut] if norm_first else x[:, cut] * factor[:, cut]
        normed = torch.nn.functional.rms_norm(inner, (4,), weight[group], 1e-5)
        torch.testing.assert_close(y[:, cut], normed * factor[:, cut] if norm_first else normed)


needs_module = pytest.mark.skipif(
    cpu.unavailable(torch.device("cpu")) is not None, reason="the C++ kernels are not built"
)


@needs_module
@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 30, 1, 7], [2, 100], [150]])
@pytest.mark.parametrize("name", _OPS)
def test_the_cpu_kernels_equal_the_spec(name: str, lengths: list[int]) -> None:
    slots = torch.tensor([5, 2, 7, 0][: len(lengths)])
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    outputs, states = [], []
    for backend in (ref, cpu_recurrent):
        rows, shape, op = _case(name, backend)
        states.append(_random(8, *shape, seed=9))
        outputs.append(op(*(each[: sum(lengths)] for each in rows), states[-1], slots, starts))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=2e-5)


@needs_module
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("shape", [(3, 8), (8,), (1, 24)])
def test_the_cpu_gated_norm_equals_the_spec(norm_first: bool, shape: tuple[int, ...]) -> None:
    arguments = (_random(5, 24), _random(5, 24, seed=1), _random(*shape, seed=2), 1e-5, norm_first, 0.5)
    torch.testing.assert_close(cpu_recurrent.gated_norm(*arguments), ref.gated_norm(*arguments))
