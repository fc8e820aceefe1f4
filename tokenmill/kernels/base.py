"""The op table: which implementation runs each operation, and why faster ones declined.

An operation is a name with an ordered list of backends; the first that does not decline wins, and the plain torch one
(`ref`), which is the spec, never declines. Linear products are chosen per weight, everything else per device. Knows
nothing of models. `inspect` prints the choices.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from tokenmill.errors import unknown_name
from tokenmill.kernels.host import Device

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = ("cpu", "triton", "ref")  # fastest first; `ref` must be last
FORCE_VARIABLE = "TOKENMILL_KERNELS"


class StoredWeight(Protocol):
    """A weight matrix [out, in] as the kernels see it; implemented by model/formats."""

    type_name: str
    out_features: int
    in_features: int
    bias: Tensor | None
    precise: bool  # the model is most sensitive to rounding of its input: a kernel that rounds should round less here
    activations: str  # how the input must be rounded (rounding.py): part of what the weight means
    input_scale: float | None

    def parts(self) -> dict[str, Tensor]:
        """The stored tensors by role (such as {"blocks": uint8 [out, row_bytes]})."""
        ...

    def dequantize(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end) as float32 [end - begin, in]."""
        ...


class LinearKernel(Protocol):
    """A weight prepared for one backend; calling it multiplies."""

    backend: str
    detail: str

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """The result of a selection: the backend that runs, and those that declined, with their reasons."""

    op: str
    backend: str
    run: Callable[..., Any]
    declined: tuple[tuple[str, str], ...] = ()


class Declined(Exception):
    """Raised by a backend that does not support this device, type or shape; the reason is shown by `inspect`."""


def candidate_backends(forced: str = "") -> tuple[str, ...]:
    """Backends in order of preference; a forced one (argument, else environment) is followed by `ref`, only for ops
    that it does not have at all."""
    name = forced or os.environ.get(FORCE_VARIABLE, "")
    if not name:
        return BACKENDS
    if name not in BACKENDS:
        raise unknown_name("kernel backend", name, BACKENDS)
    return (name, "ref") if name != "ref" else ("ref",)


def select(op: str, device: Device, forced: str = "") -> Choice:
    """Choose the implementation of a weightless op on a device."""
    declined: list[tuple[str, str]] = []
    for backend in candidate_backends(forced):
        module = import_module(f"tokenmill.kernels.{backend}")
        reason = module.unavailable(device)
        run = module.find_op(op) if reason is None else None
        if run is not None:
            return Choice(op, backend, run, tuple(declined))
        reason = reason or "has no such op"
        declined.append((backend, reason))
    raise AssertionError(f"the reference backend declined {op}: {declined}")


def select_linear(weight: StoredWeight, device: Device, forced: str = "", dtype: Any = None) -> Choice:
    """Prepare a weight for the first backend that supports it; `run` is then a LinearKernel. `dtype`: a torch dtype in
    which a GPU's kernels compute, if it is not their own choice."""
    declined: list[tuple[str, str]] = []
    for backend in candidate_backends(forced):
        module = import_module(f"tokenmill.kernels.{backend}")
        reason = module.unavailable(device)
        if reason is None:
            try:
                wanted = (dtype,) if dtype is not None and backend == "triton" else ()
                return Choice("linear", backend, module.make_linear(weight, *wanted), tuple(declined))
            except Declined as error:
                reason = str(error)
        declined.append((backend, reason))
    raise AssertionError(f"the reference backend declined {weight.type_name}: {declined}")
