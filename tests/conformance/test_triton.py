"""The GPU kernels without a GPU: the test_triton_*.py files run in a process of their own under Triton's interpreter.

On a machine with a GPU those files run directly, on the real thing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreter import assert_passes_interpreted

_FILES = sorted(Path(__file__).parent.glob("test_triton_*.py"))
_ROOT = Path(__file__).parents[2]


_SLOW = ("test_triton_rotated",)  # many shapes of one fused ending


def test_under_the_interpreter(pytestconfig: pytest.Config) -> None:
    """In one process: importing torch and triton takes longer than many of these files."""
    assert_passes_interpreted(pytestconfig, *(file for file in _FILES if file.stem not in _SLOW))


@pytest.mark.slow
@pytest.mark.parametrize("name", _SLOW)
def test_long_files_under_the_interpreter(name: str, pytestconfig: pytest.Config) -> None:
    assert_passes_interpreted(pytestconfig, Path(__file__).with_name(f"{name}.py"))


def test_a_machine_without_a_gpu_does_not_import_triton() -> None:
    script = (
        "import sys, torch; from tokenmill.kernels.base import select; "
        "choice = select('add', torch.device('cpu'), 'triton'); "
        "assert choice.backend == 'ref' and 'GPU' in choice.declined[0][1], choice; assert 'triton' not in sys.modules"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", script], cwd=_ROOT, env=environment, check=True)
