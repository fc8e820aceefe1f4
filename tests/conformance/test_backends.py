"""Every op of every backend against the plain torch spec, over odd shapes. A backend that is registered is tested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.devices import BACKEND_OF, DEVICES
from tokenmill.checkpoint.description import ACTIVATIONS
from tokenmill.kernels import cpu, ref
from tokenmill.kernels.base import BACKENDS, select
from tokenmill.runtime.executors.eager import OPS

# Under the interpreter Triton's ops have tests of their own (test_triton_ops.py).
_CASES = [(device, backend) for device in DEVICES for backend in BACKENDS if backend == BACKEND_OF[device.type]]


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def _attention_arguments(pages_dtype: torch.dtype, window: int, cap: float) -> tuple[Any, ...]:
    kv_heads, page_size, head_dim, group = 2, 16, 40, 3
    counts, lengths = [1, 5, 17, 1], [33, 5, 60, 1]
    num_pages = 24
    k = _random(num_pages, kv_heads, page_size, head_dim, seed=1).to(pages_dtype)
    v = _random(num_pages, kv_heads, page_size, head_dim, seed=2).to(pages_dtype)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(5)).int()
    table = torch.full((4, 4), -1, dtype=torch.int32)
    used = 0
    for row, length in enumerate(lengths):
        pages = -(-length // page_size)
        table[row, :pages] = order[used : used + pages]
        used += pages
    starts = torch.tensor([0, 1, 6, 23, 24], dtype=torch.int32)
    q = _random(sum(counts), kv_heads * group * head_dim, seed=3)
    return q, k, v, table, starts, torch.tensor(lengths, dtype=torch.int32), head_dim**-0.5, window, cap


def _cos_sin(half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(64.0), torch.rand(half, generator=torch.Generator().manual_seed(0)))
    return angles.cos(), angles.sin()


CASES: dict[str, list[Callable[[], tuple[Any, ...]]]] = {
    "rms_norm": [
        lambda: (_random(3, 577), _random(577, seed=1), 1e-5),
        lambda: (_random(5, 96), _random(24), 1e-6, 24),
    ],
    "layer_norm": [
        lambda: (_random(3, 577) + 2, _random(577, seed=1), _random(577, seed=2), 1e-5),
        lambda: (_random(3, 130), _random(130, seed=1), None, 1e-5),
        lambda: (_random(5, 96), _random(24), _random(24, seed=1), 1e-6, 24),
        lambda: (_random(5, 96), _random(96), None, 1e-6, 24),
    ],
    "scale": [lambda: (_random(3, 99), 0.22)],
    "add_positions": [lambda: (_random(4, 99), _random(9, 99, seed=1), torch.tensor([0, 8, 3, 3]))],
    "activate": [
        lambda name=name: (_random(3, 99) * 8, name)  # type: ignore[misc]
        for name in ACTIVATIONS
    ],
    "add": [lambda: (_random(3, 577), _random(3, 577, seed=1))],
    "add_rms_norm": [lambda: (_random(4, 130), _random(4, 130, seed=1), _random(130), 1e-5)],
    "gated": [
        lambda name=name: (_random(3, 99) * 8, _random(3, 99, seed=1), name)  # type: ignore[misc]
        for name in ACTIVATIONS
    ],
    "gate_rows": [lambda: (_random(3, 99), _random(3, 1, seed=1) * 4)],
    "argmax": [lambda: (_random(3, 1001),), lambda: (torch.zeros(2, 5),)],
    "softcap": [lambda: (_random(3, 99) * 40, 30.0)],
    "rope": [
        lambda interleaved=interleaved, half=half: (  # type: ignore[misc]
            _random(7, 3 * 20),
            torch.tensor([0, 1, 5, 63, 9, 9, 2]),
            *_cos_sin(half),
            20,
            interleaved,
        )
        for interleaved in (False, True)
        for half in (10, 6)
    ],
    "store_kv": [
        lambda dtype=dtype: (_random(5, 2 * 24), torch.zeros(6, 2, 8, 24, dtype=dtype), torch.tensor([3, 40, 41, 8, 0]))  # type: ignore[misc]
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ],
    "attention": [
        lambda dtype=dtype, window=window, cap=cap: _attention_arguments(dtype, window, cap)  # type: ignore[misc]
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for window, cap in ((0, 0.0), (9, 0.0), (0, 20.0))
    ],
}


def test_every_op_has_a_case() -> None:
    assert set(CASES) == set(OPS)


def test_every_backend_has_a_device() -> None:
    assert {*BACKEND_OF.values(), "ref"} == set(BACKENDS)


@pytest.mark.parametrize(("device", "backend"), _CASES, ids=[backend for _, backend in _CASES])
@pytest.mark.parametrize("op", OPS)
def test_op_equals_its_spec(op: str, device: torch.device, backend: str) -> None:
    choice = select(op, device, backend)
    if choice.backend != backend:
        pytest.skip(f"{backend} declined: {dict(choice.declined)[backend]}")
    for make in CASES[op]:
        expected_arguments, arguments = (
            tuple(each.to(device) if isinstance(each, torch.Tensor) else each for each in make()) for _ in range(2)
        )
        expected = getattr(ref, op)(*expected_arguments)
        got = choice.run(*arguments)
        if expected is None:  # works in place
            expected, got = expected_arguments[1], arguments[1]
        expected, got = (each if isinstance(each, tuple) else (each,) for each in (expected, got))
        for wanted, found in zip(expected, got, strict=True):
            rtol, atol = (1e-5, 2e-5) if device.type == "cpu" else (1e-3, 1e-3)  # faster exponentials
            if op == "attention" and backend == "cpu" and arguments[1].dtype == torch.float16:
                halves = cpu.multiplies_halves(arguments[1].shape[-1])
                rtol, atol = (1e-3, 5e-3) if halves else (rtol, atol)
            torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)
