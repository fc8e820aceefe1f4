"""Every instruction set the C++ kernels know, on the ones this machine has: int8 rounding, equal bits, equal threads.

A set that cannot run here is skipped with the reason the module gives. csrc/cpu/test/linear_test.cpp sweeps far more
shapes; this file holds the sets to the same through the binding, and the binding to refusing what cannot run.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.kernels.test_linear_kernels import activation_bound, random_weight

_cpu = pytest.importorskip("tokenmill.kernels._cpu", reason="the C++ kernels are not built")

ISAS = ["portable", "neon_dotprod", "neon_i8mm", "avx2", "avx512_vnni", "amx"]
# The same sums in the same order, only with wider instructions.
TWINS = [("neon_i8mm", "neon_dotprod"), ("amx", "avx512_vnni")]
TYPES = ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL", "NVFP4", "IQ2_XXS", "IQ2_S", "IQ3_S", "IQ1_S", "TQ2_0"]
ROWS, COLS = 75, 1536  # not whole panels; more than one chunk of the expanded product


def skip_unless_here(isa: str) -> None:
    if reason := _cpu.isas()[isa]:
        pytest.skip(f"{isa}: {reason}")


def multiply(name: str, isa: str, num_tokens: int, threads: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The product on `isa`, the exact one, and how far rounding may take them apart."""
    raw, weight = random_weight(name, ROWS, COLS)
    x = torch.randn(num_tokens, COLS, generator=torch.Generator().manual_seed(num_tokens))
    out = torch.full((num_tokens, ROWS), torch.nan)
    packed = _cpu.PackedLinear(name, torch.from_numpy(raw), ROWS, COLS, isa)
    assert packed.kernel == f"{name} {isa}"
    _cpu.linear(_cpu.Pool.shared(threads), x, [packed], [None], [out])
    return out.numpy(), x.numpy().astype(np.float64) @ weight.T, activation_bound(weight, x.numpy())


def test_all_sets_are_listed_and_the_best_one_runs() -> None:
    assert list(_cpu.isas()) == ISAS
    assert _cpu.isas()["portable"] is None
    assert _cpu.isas()[_cpu.best_isa()] is None


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", TYPES)
def test_product_is_within_int8_rounding(name: str, isa: str) -> None:
    skip_unless_here(isa)
    for num_tokens in (1, 5, 16, 45):
        product, exact, bound = multiply(name, isa, num_tokens)
        assert (np.abs(product - exact) <= bound).all()


@pytest.mark.parametrize(("isa", "twin"), TWINS)
@pytest.mark.parametrize("name", TYPES)
def test_same_bits_as_the_twin(name: str, isa: str, twin: str) -> None:
    skip_unless_here(isa)
    for num_tokens in (1, 5, 16, 45):
        assert (multiply(name, isa, num_tokens)[0] == multiply(name, twin, num_tokens)[0]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_same_bits_whatever_the_threads(isa: str) -> None:
    skip_unless_here(isa)
    for name in ("Q4_1", "Q4_K"):
        for num_tokens in (1, 6, 70):
            alone = multiply(name, isa, num_tokens, threads=1)[0]
            for threads in (2, 3, 8):
                assert (multiply(name, isa, num_tokens, threads)[0] == alone).all()


@pytest.mark.parametrize("isa", ISAS)
def test_a_set_that_cannot_run_here_is_refused_with_the_reason(isa: str) -> None:
    reason = _cpu.isas()[isa]
    if reason is None:
        pytest.skip(f"{isa} runs here")
    with pytest.raises(ValueError, match=isa) as error:
        _cpu.PackedLinear("Q8_0", torch.zeros(1, 34, dtype=torch.uint8), 1, 32, isa)
    assert reason in str(error.value)
