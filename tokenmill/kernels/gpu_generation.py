"""Which generation of GPU kernels are chosen for: the GPU's own, or an earlier one that is asked for.

`TOKENMILL_GPU_KERNELS=generic` makes a Hopper GPU run what Ampere and Ada GPUs run (no Gluon, no tensor memory
accelerator, no dependent launch), so that these kernels can be proven and measured there. Everything that is chosen by
capability asks here. Needs torch, not Triton.
"""

from __future__ import annotations

import os

from tokenmill.errors import UserError

VARIABLE = "TOKENMILL_GPU_KERNELS"
GENERIC = "generic"
_LAST_GENERIC = (8, 9)  # Ada: the last one without what the Hopper kernels are written for
_FLOAT8 = (8, 9)  # from there on tensor cores and Triton have e4m3
_HOPPER = 9
_LEAST = (8, 0)


def generic_is_forced() -> bool:
    value = os.environ.get(VARIABLE, "")
    if value not in ("", GENERIC):
        raise UserError(f"{VARIABLE} is '{value}'", f"set it to {GENERIC}, or unset it for the kernels of this GPU")
    return value == GENERIC


def capability(index: int | None = None) -> tuple[int, int]:
    """Of a GPU (the current one), as kernels are chosen; at most that of Ada where generic ones are forced."""
    import torch

    own = torch.cuda.get_device_capability(index)
    return min(own, _LAST_GENERIC) if generic_is_forced() else own


def is_hopper(index: int | None = None) -> bool:
    return capability(index)[0] == _HOPPER


def hopper_or_later(index: int | None = None) -> bool:
    return capability(index)[0] >= _HOPPER


def declines_float8(device_type: str) -> str | None:
    """Why e4m3 values are not multiplied or stored by kernels there; None: they are, or it is no GPU (tests)."""
    if device_type != "cuda":
        return None
    own = capability()
    return None if own >= _FLOAT8 else f"float8 needs compute capability 8.9, this GPU has {own[0]}.{own[1]}"


def unavailable(index: int | None = None) -> str | None:
    """Why no kernel runs on a GPU that torch finds."""
    import torch

    if torch.version.hip is not None:
        return "this torch is built for AMD GPUs (ROCm); kernels are for NVIDIA GPUs, AMD is not supported"
    if torch.cuda.get_device_capability(index) < _LEAST:
        return "needs compute capability 8.0 or later"
    return None
