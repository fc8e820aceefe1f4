"""The host without torch: its arrays are numpy's, and the C++ kernels read them in place.

`HOST` stands where a torch.device stands otherwise; code that can do with either asks `on_host`. What has no form
without torch raises NeedsTorch with the reason, and the caller begins again on `torch_device()`. Imports no torch.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from tokenmill.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class HostDevice:
    type: str = "cpu"
    index: int | None = None


HOST = HostDevice()
Device = Any  # HostDevice or torch.device


class NeedsTorch(Exception):
    """This model or option has no form without torch; the message says which."""


def on_host(device: object) -> TypeGuard[HostDevice]:
    """Whether arrays there are numpy's."""
    return isinstance(device, HostDevice)


def has_torch() -> bool:
    try:
        return find_spec("torch") is not None
    except (ImportError, ValueError):  # somebody forbids it, or put something else in its place
        return False


def torch_device(reason: str, name: str = "cpu") -> torch.device:
    """The device of torch. Raises UserError where torch is not installed; `reason`: why it is needed."""
    if not has_torch():
        raise UserError(f"torch is not installed, and {reason}", "pip install 'tokenmill[torch]'")
    import torch

    return torch.device(name)


def empty(shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """Memory that the system hands out page by page as it is written. Not numpy's own: that asks for huge pages, of
    which every layer's few KV rows would take one."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < mmap.PAGESIZE or not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)


def widened(values: np.ndarray, type_name: str) -> np.ndarray:
    """Floats of a stored type as float32; numpy has no BF16, which comes as uint16."""
    if type_name == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(values, dtype=np.float32)


def address(array: Any) -> int:
    """Of the first value of a numpy array or a tensor."""
    place: int = array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()
    return place
