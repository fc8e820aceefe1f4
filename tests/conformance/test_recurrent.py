"""Every recurrent op of every backend against the plain torch spec: odd shapes, sequences of any length in one batch,
states in scattered slots, and equal bits however a sequence is cut into steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.devices import BACKEND_OF, DEVICES
from tokenmill.kernels import ref
from tokenmill.kernels.base import BACKENDS, Choice, select
from tokenmill.runtime.executors.eager import RECURRENT_OPS

_BACKENDS = [(device, backend) for device in DEVICES for backend in BACKENDS if backend == BACKEND_OF[device.type]]
_LENGTHS = [[1], [1, 1, 1], [3, 40, 1, 17], [16, 33]]
_SLOTS = 7


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def _negative(*shape: int) -> Tensor:
    return -torch.exp(_random(*shape))


Case = tuple[tuple[Tensor, ...], tuple[int, ...], tuple[Any, ...]]  # rows, shape of a state, other arguments


def _convolve(rows: int, channels: int, width: int, bias: bool) -> Case:
    weight, offsets = _random(width, channels, seed=1), _random(channels, seed=2) if bias else None
    return (_random(rows, channels),), (width - 1, channels), (weight, offsets)


def _mamba(rows: int, inner: int, size: int) -> Case:
    inputs = (_random(rows, inner), _random(rows, inner, seed=1), _random(rows, size), _random(rows, size, seed=1))
    return inputs, (inner, size), (_negative(inner, size), _random(inner, seed=2))


def _mamba2(rows: int, heads: int, dim: int, size: int, groups: int) -> Case:
    inputs = (_random(rows, heads * dim + 2 * groups * size), _random(rows, heads))
    arguments = (_negative(heads), _random(heads, seed=1), _random(heads, seed=2), groups, 1.3, (0.01, 2.0))
    return inputs, (heads, dim, size), arguments


def _delta(rows: int, heads: int, key_heads: int, keys: int, values: int) -> Case:
    inputs = (_random(rows, 2 * key_heads * keys + heads * values), _random(rows, heads), _random(rows, heads, seed=1))
    return inputs, (heads, keys, values), (_negative(heads), _random(heads, seed=2), key_heads)


# Whole vectors and blocks of them, remainders of both, and sizes below one vector.
CASES: dict[str, list[Callable[[int], Case]]] = {
    "convolve": [
        lambda rows: _convolve(rows, 24, 4, True),
        lambda rows: _convolve(rows, 517, 3, False),
        lambda rows: _convolve(rows, 5, 2, True),
    ],
    "mamba_scan": [
        lambda rows: _mamba(rows, 24, 16),
        lambda rows: _mamba(rows, 300, 9),
        lambda rows: _mamba(rows, 3, 2),
    ],
    "mamba2_scan": [
        lambda rows: _mamba2(rows, 4, 16, 64, 2),
        lambda rows: _mamba2(rows, 6, 5, 75, 3),
        lambda rows: _mamba2(rows, 2, 1, 3, 1),
    ],
    "delta_scan": [
        lambda rows: _delta(rows, 4, 2, 16, 64),
        lambda rows: _delta(rows, 6, 2, 7, 83),
        lambda rows: _delta(rows, 2, 2, 3, 2),
    ],
}


def _choice(op: str, device: torch.device, backend: str) -> Choice:
    choice = select(op, device, backend)
    if choice.backend != backend:
        pytest.skip(f"{backend} declined: {dict(choice.declined)[backend]}")
    return choice


def _moved(values: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    return tuple(each.to(device) if isinstance(each, Tensor) else each for each in values)


def test_every_op_has_a_case() -> None:
    assert {*CASES, "gated_norm"} == set(RECURRENT_OPS)


@pytest.mark.parametrize(("device", "backend"), _BACKENDS, ids=[backend for _, backend in _BACKENDS])
@pytest.mark.parametrize("lengths", _LENGTHS, ids=str)
@pytest.mark.parametrize("op", CASES)
def test_op_equals_its_spec(op: str, lengths: list[int], device: torch.device, backend: str) -> None:
    choice = _choice(op, device, backend)
    slots = torch.tensor([5, 2, 6, 0][: len(lengths)], device=device)
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    for make in CASES[op]:
        rows, shape, arguments = make(sum(lengths))
        rows, arguments = _moved(rows, device), _moved(arguments, device)
        states = [_random(_SLOTS, *shape).to(device) for _ in range(2)]
        expected = getattr(ref.ref_recurrent, op)(*rows, states[0], slots, starts, *arguments)
        got = choice.run(*rows, states[1], slots, starts, *arguments)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=5e-5)
        torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=5e-5)
        others = [slot for slot in range(_SLOTS) if slot not in slots.tolist()]
        assert torch.equal(states[1][others], _random(_SLOTS, *shape).to(device)[others])


@pytest.mark.parametrize("splits", [[1] * 50, [5] * 10, [16, 34], [17, 1, 32]], ids=str)
@pytest.mark.parametrize("op", CASES)
def test_how_a_sequence_is_cut_changes_no_bit_on_a_cpu(op: str, splits: list[int]) -> None:
    """Drafts, chunks of prompts and runs of tokens are computed in rows of other lengths than single steps."""
    run = _choice(op, torch.device("cpu"), "cpu").run
    for make in CASES[op]:
        rows, shape, arguments = make(50)
        states = [_random(1, *shape) for _ in range(2)]
        slot = torch.tensor([0])
        expected = run(*rows, states[0], slot, torch.tensor([0, 50]), *arguments)
        parts, begin = [], 0
        for count in splits:
            part = tuple(each[begin : begin + count] for each in rows)
            parts.append(run(*part, states[1], slot, torch.tensor([0, count]), *arguments))
            begin += count
        assert torch.equal(torch.cat(parts), expected)
        assert torch.equal(states[1], states[0])


@pytest.mark.parametrize(("device", "backend"), _BACKENDS, ids=[backend for _, backend in _BACKENDS])
@pytest.mark.parametrize("norm_first", [True, False])
def test_gated_norm_equals_its_spec(norm_first: bool, device: torch.device, backend: str) -> None:
    choice = _choice("gated_norm", device, backend)
    for shape in ((3, 22), (22,), (1, 66)):
        arguments = (_random(5, 66), _random(5, 66, seed=1) * 8, _random(*shape, seed=2), 1e-5, norm_first, 0.5)
        arguments = _moved(arguments, device)  # type: ignore[assignment]
        expected = ref.ref_recurrent.gated_norm(*arguments)
        torch.testing.assert_close(choice.run(*arguments), expected, rtol=1e-5, atol=2e-5)


def test_a_gate_of_attention_equals_its_spec_on_a_cpu() -> None:
    """Qwen3-Next gates what attention gives by a sigmoid."""
    arguments = (_random(3, 99) * 8, _random(3, 99, seed=1), "sigmoid")
    choice = _choice("gated", torch.device("cpu"), "cpu")
    torch.testing.assert_close(choice.run(*arguments), ref.gated(*arguments), rtol=1e-5, atol=2e-5)
