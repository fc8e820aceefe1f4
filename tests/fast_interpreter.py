"""Triton's interpreter without work that it repeats, for processes that run whole test files under it.

It replaces the functions of triton.language before each launch and again before each call of a device function, finds
them by listing whole modules, and puts them back after the launch. In a process that runs nothing but interpreted
kernels they can stay replaced: a third to a half of the tests' time. A pytest plugin (-p tests.fast_interpreter).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


def pytest_sessionstart(session: pytest.Session) -> None:
    del session
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_patch_lang") or not hasattr(interpreter, "_get_np_dtype"):
        return  # another version than this was written for: slower, and right
    # It replaces what a kernel's module has imported: of one that has imported both, that is everything.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    nothing = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda _function: nothing

    numpy_type, known = interpreter._get_np_dtype, dict[str, Any]()

    def kept_numpy_type(of: Any) -> Any:
        name = of.scalar.name
        if name not in known:
            known[name] = numpy_type(of)
        return known[name]

    interpreter._get_np_dtype = kept_numpy_type
