"""Speed of the engine's own linear kernel for each weight type on this device: what predictions are made of.

A matrix of the model's most common shape is made up in each type, enough copies of it to read memory as a model does,
and multiplied with as many rows as decoding and prompts have. A few seconds in all. The kernel is the one that the
loader would choose (`select_linear`). Knows nothing of models or candidates. Called by predict.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from tokenmill.calibrate.device_timing import device_seconds
from tokenmill.checkpoint.base import StoredTensor
from tokenmill.kernels.base import Choice, select_linear
from tokenmill.kernels.ggml_types import TYPES
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.formats.coded import CodedWeight
from tokenmill.model.formats.dense import DenseWeight
from tokenmill.model.formats.ggml import GgmlWeight
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme

_COLD_BYTES = {"cpu": 40 << 20, "cuda": 256 << 20}  # beyond the caches of most devices
_MAX_COPIES = 16
_MULTIPLE = 256  # of both dimensions: every block size divides it
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class KernelSpeed:
    """Seconds per weight of a product with `rows` rows, by rows. `backend` "ref": no kernel, torch expands it."""

    backend: str
    seconds: dict[int, float] = field(default_factory=dict)


class KernelProbe:
    """`shape`: outputs and inputs of the matrix; `rows`: of the inputs; `model_weights`: how many the model reads."""

    def __init__(
        self,
        shape: tuple[int, int],
        rows: Sequence[int],
        device: torch.device,
        model_weights: int = 1 << 62,
        seconds_each: float = 0.06,
    ) -> None:
        self.outputs, self.inputs = (-(-size // _MULTIPLE) * _MULTIPLE for size in shape)
        self.rows = sorted(set(rows))
        self._device = device
        self._model_weights = model_weights
        self._seconds_each = seconds_each

    def ggml(self, type_name: str) -> KernelSpeed:
        """A type of GGUF files, floats included."""
        return self._measure(lambda: _ggml_weight(type_name, self.outputs, self.inputs, self._device))

    def scheme(self, scheme: Scheme) -> KernelSpeed:
        if scheme.element == "float":  # pruned: zeros are multiplied like other weights
            return self.ggml("BF16")
        return self._measure(lambda: _MadeUpWeight(scheme, self.outputs, self.inputs, self._device))

    def _measure(self, make: Callable[[], LinearWeight]) -> KernelSpeed:
        weights = self.outputs * self.inputs
        first = make()
        size = max(1, first.nbytes)
        choices = [select_linear(first, self._device)]
        if choices[0].backend != "ref":
            read = min(_COLD_BYTES[self._device.type], self._model_weights * size // weights)
            count = min(_MAX_COPIES, -(-read // size))
            choices += [select_linear(make(), self._device) for _ in range(1, count)]
        return KernelSpeed(choices[0].backend, {rows: self._time(choices, rows) / weights for rows in self.rows})

    def _time(self, choices: list[Choice], rows: int) -> float:
        on_gpu = self._device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu and choices[0].backend != "ref" else torch.float32
        x = torch.randn(rows, self.inputs, device=self._device, dtype=dtype)
        if on_gpu:
            return device_seconds([partial(choice.run, x) for choice in choices])
        choices[0].run(x)
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < 3 or (time.perf_counter() - began < self._seconds_each and len(times) < 200):
            start = time.perf_counter()
            choices[(len(times) + 1) % len(choices)].run(x)
            times.append(time.perf_counter() - start)
        return min(times)  # what else runs on the machine only adds


def _ggml_weight(type_name: str, outputs: int, inputs: int, device: torch.device) -> LinearWeight:
    if type_name in _FLOATS:
        data = torch.full((outputs, inputs), 0.5, dtype=_FLOATS[type_name], device=device)
        return DenseWeight(StoredTensor("probe", (outputs, inputs), type_name, data))
    size = (outputs, TYPES[type_name].row_bytes(inputs))
    blocks = torch.full(size, 33, dtype=torch.uint8, device=device)  # a byte that makes scales finite
    return GgmlWeight(StoredTensor("probe", (outputs, inputs), type_name, blocks))


class _MadeUpWeight(CodedWeight):
    """A matrix of a scheme, all codes and scales one."""

    format_name = "probe"

    def __init__(self, scheme: Scheme, outputs: int, inputs: int, device: torch.device) -> None:
        self.describe(scheme, (outputs, inputs), torch.float16)
        codes = torch.ones(outputs, inputs, dtype=torch.uint8)
        down = -(-outputs // scheme.block_rows) if scheme.block_rows else 1
        scales = torch.ones(down, inputs // scheme.group_size if scheme.group_size else 1)
        integers = scheme.element == "int" and not scheme.symmetric
        zeros = torch.full_like(scales, 2.0 ** (scheme.bits - 1)) if integers else None
        codebook = scheme.element == "codebook"
        static = scheme.activations.endswith("static") or scheme.activations == "nvfp4"
        self.input_scale = 1.0 if static else None
        self.matrix = QuantizedMatrix(
            scheme,
            codes,
            scales,
            zeros,
            input_scale=self.input_scale,
            table=torch.linspace(-1, 1, 2**scheme.bits) if codebook else None,
            rotation_seed=0 if codebook else None,
        ).to(device)

    def parts(self) -> dict[str, Tensor]:
        return {"codes": self.matrix.codes, "scales": self.matrix.scales}

    @property
    def nbytes(self) -> int:
        return int(self.matrix.codes.numel() * self.scheme.bits_per_weight / 8)

    def decode(self, begin: int = 0, end: int | None = None) -> QuantizedMatrix:
        block = self.scheme.block_rows
        last = self.out_features if end is None else end
        down = slice(begin // block, -(-last // block)) if block else slice(None)
        m = self.matrix
        zeros = None if m.zeros is None else m.zeros[down]
        return replace(m, codes=m.codes[begin:last], scales=m.scales[down], zeros=zeros)
