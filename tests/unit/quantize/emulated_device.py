"""A second device on a machine that has none: tensors moved or made there are marked and stay where they are.

Inside `EmulatedGPU` a marked tensor says that it is on `GPU`, what is computed from marked tensors is marked, and an
operation on a marked and a plain tensor fails as it would between a GPU and the host. Numbers are the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
_OF_SHAPES = ("copy_", "view_as", "expand_as")  # what they read of the second tensor may be anywhere


class EmulatedGPU(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._marked = WeakIdKeyDictionary()
        self.num_ops = 0  # that computed there

    def holds(self, tensor: Tensor) -> bool:
        return bool(self._marked.get(tensor, False))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return GPU if self.holds(args[0]) else HOST
        if name in ("to", "cpu"):
            return self._move(args[0], HOST if name == "cpu" else None, args[1:], kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        wanted = kwargs.get("device")
        if wanted is not None:
            kwargs["device"] = HOST
        marked = wanted.type == "cuda" if wanted is not None else self._place(name, args, tensors)
        self.num_ops += marked
        return self.mark(func(*args, **kwargs), marked)

    def mark(self, value: Any, marked: bool = True) -> Any:
        for each in tree_leaves(value) if isinstance(value, (Tensor, tuple, list)) else []:
            if isinstance(each, Tensor) and (marked or not self.holds(each)):
                self._marked[each] = marked
        return value

    def _move(
        self, tensor: Tensor, target: torch.device | None, words: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tensor:
        given = [*words, *kwargs.values()]
        target = target or next((torch.device(each) for each in given if isinstance(each, (torch.device, str))), None)
        dtype = next((each for each in given if isinstance(each, torch.dtype)), tensor.dtype)
        marked = self.holds(tensor) if target is None else target.type == "cuda"
        moved = tensor.to(dtype)
        self._marked[moved if marked == self.holds(tensor) else (moved := moved.clone())] = marked
        return moved

    def _place(self, name: str, args: Any, tensors: Sequence[Tensor]) -> bool:
        """Whether the result is on the GPU. Indices may be the host's, and numbers without dimensions too."""
        first = bool(tensors) and self.holds(tensors[0])
        if name in _OF_SHAPES or name == "__get__":
            return first
        if name in ("__getitem__", "__setitem__"):
            stored = [args[2]] if name == "__setitem__" and isinstance(args[2], Tensor) else []
            tensors = [args[0], *stored, *(each for each in tensors if not first and self.holds(each))]
        places = {self.holds(each) for each in tensors if each.dim() or self.holds(each)}
        assert len(places) < 2, f"{name} mixes devices: {[(tuple(each.shape), self.holds(each)) for each in tensors]}"
        return True in places


@contextmanager
def emulated_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedGPU]:
    mode = EmulatedGPU()
    grad: Callable[..., Any] = torch.autograd.grad
    generator = torch.Generator

    def marked_grad(outputs: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        found = grad(outputs, inputs, *rest, **more)
        for each, slope in zip([inputs] if isinstance(inputs, Tensor) else inputs, found, strict=True):
            mode.mark(slope, mode.holds(each))
        return found

    with monkeypatch.context() as patch, mode:
        patch.setattr(torch.autograd, "grad", marked_grad)
        patch.setattr(torch, "Generator", lambda *_: generator())
        yield mode
