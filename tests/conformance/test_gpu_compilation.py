"""Kernels of experts, attention, float8 blocks, W4A8, recurrent layers, quantized pages and of models in float16
compile for Hopper, within its registers and shared memory, on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "qwen3-30b bf16",
        "qwen3-30b fp8",
        "qwen3-30b int4",
        "gpt-oss-20b mxfp4",
        "sinks",
        "prefixes",
        "sampling",
        "latent",
        "blocks",
        "router",
        "w4a8 128",
        "recurrent",
        "adapters",
        "half",
        "packed int4",
        "packed turboquant4",
    ],
)
def test_kernels_compile_for_hopper(case: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tools.compile_gpu_kernels", *case.split()]
    result = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    assert " 0 failures" in result.stdout
