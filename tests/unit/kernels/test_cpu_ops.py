"""The C++ float ops against their torch twins: odd widths, extreme values, one row and many."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels import cpu, ref

pytestmark = pytest.mark.skipif(
    cpu.unavailable(torch.device("cpu")) is not None, reason=str(cpu.unavailable(torch.device("cpu")))
)

SHAPES = [(1, 1), (1, 576), (3, 17), (7, 1536), (65, 33), (2, 4099)]


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator) * scale


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_norms_and_sums(shape: tuple[int, int], scale: float) -> None:
    x, y, weight = random(*shape, scale=scale), random(*shape, scale=scale).flip(0), random(shape[1])
    close(cpu.rms_norm(x, weight, 1e-5), ref.rms_norm(x, weight, 1e-5))
    assert torch.equal(cpu.add(x, y), x + y)
    total, normed = cpu.add_rms_norm(x, y, weight, 1e-6)
    assert torch.equal(total, x + y)
    close(normed, ref.rms_norm(x + y, weight, 1e-6))


def test_norm_by_heads() -> None:
    x, weight = random(5, 3 * 64), random(64)
    close(cpu.rms_norm(x, weight, 1e-6, 64), ref.rms_norm(x, weight, 1e-6, 64))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("scale", [0.01, 1.0, 200.0])
def test_gated(shape: tuple[int, int], activation: str, scale: float) -> None:
    gate, up = random(*shape, scale=scale), random(*shape)
    expected = ref.gated(gate.double(), up.double(), activation).float()
    close(cpu.gated(gate, up, activation), expected)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1000.0])
def test_softcap(scale: float) -> None:
    x = random(3, 1001, scale=scale)
    expected = ref.softcap(x.double(), 30.0).float()
    torch.testing.assert_close(cpu.softcap(x, 30.0), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", [2, 10, 64, 128])
def test_rope(interleaved: bool, head_dim: int) -> None:
    angles = random(50, head_dim // 2)
    x, positions = random(9, 3 * head_dim), torch.randint(0, 50, (9,))
    actual = cpu.rope(x, positions, angles.cos(), angles.sin(), head_dim, interleaved)
    close(actual, ref.rope(x, positions, angles.cos(), angles.sin(), head_dim, interleaved))


def test_rope_refuses_positions_outside_its_table() -> None:
    with pytest.raises(ValueError, match="outside the table"):
        cpu.rope(random(1, 4), torch.tensor([50]), random(50, 2), random(50, 2), 4, False)


@pytest.mark.parametrize(("rows", "width", "k"), [(1, 49152, 40), (3, 1000, 1), (2, 5, 5), (4, 513, 256)])
def test_argmax_and_top_k(rows: int, width: int, k: int) -> None:
    logits = random(rows, width)
    assert cpu.argmax(logits).tolist() == logits.argmax(-1).tolist()
    values, indices = cpu.top_k(logits, k)
    expected = logits.topk(k)
    assert torch.equal(values, expected.values)
    assert torch.equal(logits.gather(1, indices), values)


def test_ties_go_to_the_lower_index() -> None:
    logits = torch.zeros(2, 3000)
    logits[1, 1700] = logits[1, 1200] = logits[1, 2999] = 1.0
    assert cpu.argmax(logits).tolist() == [0, 1200]
    assert cpu.top_k(logits, 4)[1].tolist() == [[0, 1, 2, 3], [1200, 1700, 2999, 0]]
