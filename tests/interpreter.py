"""Runs test files in a process of its own under Triton's interpreter.

The interpreter must be chosen before triton is imported, and it must not leak into the other tests of this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_ROOT = Path(__file__).parents[1]


def assert_passes_interpreted(*files: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("these files run on the GPU itself")
    environment = os.environ | {"TRITON_INTERPRET": "1", "TOKENMILL_TUNING": "off", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *map(str, files)]
    result = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout, result.stdout
