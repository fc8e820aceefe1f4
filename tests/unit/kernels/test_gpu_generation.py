"""What is chosen for which generation of GPU, by a capability that is only pretended."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tokenmill.errors import UserError
from tokenmill.kernels import gpu_generation
from tokenmill.kernels import triton as gpu
from tokenmill.kernels.triton.matmul import make
from tokenmill.kernels.triton.matmul.linear import DenseLinear, ScaledLinear
from tokenmill.kernels.triton.shared import launch
from tokenmill.model import device_experts
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.formats.float8 import Float8Weight
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.model.formats.stacks import WeightStack
from tokenmill.model.kvstore.float8 import Float8Store

_CUDA = torch.device("cuda", 0)
_CACHED: tuple[Any, ...] = (launch._supports_pdl, launch.on_hopper, launch.copies_by_descriptor)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(gpu_generation.VARIABLE, raising=False)
    monkeypatch.delenv(launch.PDL_VARIABLE, raising=False)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    for each in _CACHED:
        each.cache_clear()
    yield
    for each in _CACHED:
        each.cache_clear()


def _pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None = None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _index=None: capability)
    monkeypatch.setattr(torch.version, "hip", hip)


@pytest.mark.parametrize(
    ("capability", "forced", "hopper", "dependent", "float8"),
    [
        ((8, 0), "", False, False, False),
        ((8, 6), "", False, False, False),
        ((8, 9), "", False, False, True),
        ((9, 0), "", True, True, True),
        ((9, 0), "generic", False, False, True),
        ((8, 0), "generic", False, False, False),
        ((10, 0), "", False, True, True),
        ((10, 0), "generic", False, False, True),
    ],
)
def test_choices(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    forced: str,
    hopper: bool,
    dependent: bool,
    float8: bool,
) -> None:
    _pretend(monkeypatch, capability)
    monkeypatch.setenv(gpu_generation.VARIABLE, forced)
    assert launch.on_hopper() == hopper
    assert launch.uses_pdl(_CUDA) == dependent
    assert launch.copies_by_descriptor() == dependent
    assert (gpu_generation.declines_float8("cuda") is None) == float8
    assert gpu_generation.declines_float8("cpu") is None
    assert gpu.unavailable(_CUDA) is None


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpu_generation.VARIABLE, "turing")
    with pytest.raises(UserError, match=r"TOKENMILL_GPU_KERNELS is 'turing'.*generic"):
        gpu_generation.generic_is_forced()


def test_older_and_other_gpus_are_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, (7, 5))
    assert "8.0 or later" in str(gpu.unavailable(_CUDA))
    _pretend(monkeypatch, (9, 4), hip="6.4")
    assert "AMD" in str(gpu.unavailable(_CUDA))


def _without_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU of capability 8.0 answers; the matrices of these tests lie on the CPU."""
    _pretend(monkeypatch, (8, 0))
    reason = gpu_generation.declines_float8("cuda")
    monkeypatch.setattr(gpu_generation, "declines_float8", lambda _type: reason)


def _matrix(**scheme: Any) -> QuantizedMatrix:
    codes = (torch.randn(128, 256) * 50).to(torch.float8_e4m3fn).view(torch.uint8)
    block = scheme.get("block_rows", 0) or 128
    scales = torch.rand(128 // block, 256 // 128 if scheme.get("group_size") else 1) + 0.1
    return QuantizedMatrix(Scheme("e4m3", 8, **{"group_size": 0, **scheme}), codes, scales)


@pytest.mark.parametrize(
    "scheme",
    [
        {"activations": "fp8_token", "block_rows": 128},
        {"activations": "fp8_token"},
        {"activations": "fp8_group128", "block_rows": 128, "group_size": 128},
    ],
)
def test_float8_weights_are_widened(monkeypatch: pytest.MonkeyPatch, scheme: dict[str, Any]) -> None:
    matrix = _matrix(**scheme)
    _without_float8(monkeypatch)
    linear = make.from_quantized(matrix, None, torch.device("cpu"))
    assert isinstance(linear, DenseLinear)
    assert "expanded from e4m3" in linear.detail
    torch.testing.assert_close(linear.weight.float(), matrix.dequantize().to(torch.bfloat16).float())


def test_float8_experts_are_widened_and_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = (torch.randn(2, 32, 128) * 30).to(torch.float8_e4m3fn)
    scales = torch.tensor([0.5, 2.0])
    experts = [
        Float8Weight({"weight": codes[number], "weight_scale": scales[number : number + 1]}, "experts")
        for number in range(2)
    ]
    read: list[LinearWeight] = []
    monkeypatch.setattr(device_experts, "declines_float8", lambda _type: "it has none")
    stack = device_experts.stack_for_gpu(
        WeightStack([[each] for each in experts]), lambda w: (read.append(w), w)[1], ""
    )
    assert stack.kind == "bf16"
    assert read == experts
    wanted = torch.stack([each.dequantize(0, 32) for each in experts]).to(torch.bfloat16)
    assert torch.equal(stack.tensors.codes, wanted.flatten(0, 1))


def test_rounding_to_float8_at_load_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_float8(monkeypatch)
    with pytest.raises(UserError, match=r"compute capability 8.9, this GPU has 8.0.*int8 or int4"):
        make.quantize_at_load(torch.randn(16, 16), None, "fp8")


def test_integers_need_no_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = QuantizedMatrix(
        Scheme("int", 8, 0, activations="int8_token"), torch.full((16, 32), 130, dtype=torch.uint8), torch.ones(16, 1)
    )
    _without_float8(monkeypatch)
    assert isinstance(make.from_quantized(matrix, None, torch.device("cpu")), ScaledLinear)


def test_float8_pages_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = SimpleNamespace(_backend="triton", device=_CUDA)
    _pretend(monkeypatch, (8, 0))
    assert "8.9" in str(Float8Store.gpu_declines(store, 0))
    _pretend(monkeypatch, (8, 9))
    assert Float8Store.gpu_declines(store, 0) is None
