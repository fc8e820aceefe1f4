"""Every registered weight type has a measured speed, by the kernel that the engine would choose."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels import cpu
from tokenmill.optimize.kernel_probe import KernelProbe
from tokenmill.quantize.ggml.mixes import MIXES
from tokenmill.quantize.schemes import METHODS

pytestmark = pytest.mark.skipif(bool(cpu.unavailable(torch.device("cpu"))), reason="the C++ kernels are not built")


@pytest.fixture(scope="module")
def probe() -> KernelProbe:
    return KernelProbe((200, 256), (4, 1), torch.device("cpu"), model_weights=1 << 17, seconds_each=0.0)


@pytest.mark.parametrize("type_name", sorted({mix.default for mix in MIXES.values()}))
def test_types_of_gguf_files(type_name: str, probe: KernelProbe) -> None:
    speed = probe.ggml(type_name)
    assert speed.backend == "cpu"
    assert list(speed.seconds) == [1, 4]
    assert all(seconds > 0 for seconds in speed.seconds.values())


@pytest.mark.parametrize("method", METHODS)
def test_schemes_of_methods(method: str, probe: KernelProbe) -> None:
    speed = probe.scheme(METHODS[method].scheme)
    assert speed.backend == ("ref" if method == "turboquant" else "cpu")  # rotated codes have no kernel
    assert all(seconds > 0 for seconds in speed.seconds.values())


def test_the_matrix_is_one_that_every_block_divides(probe: KernelProbe) -> None:
    assert (probe.outputs, probe.inputs) == (256, 256)
