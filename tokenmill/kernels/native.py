"""The C++ module `_cpu` (csrc/cpu), or why it is not there. Below everything: vocabularies use it without tensors."""

from __future__ import annotations

from typing import Any

try:
    import tokenmill.kernels._cpu as _cpu
except ImportError as error:
    _cpu = None
    _missing = f"the C++ kernels are not built ({error}); reinstall with a C++17 compiler present"
else:
    _missing = ""


def missing() -> str | None:
    """Why it cannot be used; None if it can."""
    return _missing or None


def module() -> Any:
    """Only after `missing` has returned None."""
    assert _cpu is not None, _missing
    return _cpu
