"""Runs test files in a process of its own under Triton's interpreter.

The interpreter must be chosen before triton is imported, and it must not leak into the other tests of this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

_ROOT = Path(__file__).parents[1]
Test = TypeVar("Test", bound=Callable[..., Any])


# Cases that take seconds here and nothing on a GPU, each beside a smaller one of the same kernel.
slow_interpreted = [pytest.mark.slow] if os.environ.get("TRITON_INTERPRET") == "1" else []


def slow_if_interpreted(test: Test) -> Test:
    """Of a whole test, as a decorator."""
    for mark in slow_interpreted:
        test = mark(test)
    return test


def assert_passes_interpreted(config: pytest.Config, *files: Path) -> None:
    """`config`: of the run that this is a part of, whose choice of slow tests holds here as well."""
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("these files run on the GPU itself")
    environment = os.environ | {"TRITON_INTERPRET": "1", "TOKENMILL_TUNING": "off", "CUDA_VISIBLE_DEVICES": ""}
    marks = "not slow" if config.option.markexpr == "not slow" else ""
    plugins = ["-p", "no:cacheprovider", "-p", "tests.fast_interpreter"]
    command = [sys.executable, "-m", "pytest", "-x", *plugins, "-m", marks, *map(str, files)]
    result = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout, result.stdout
