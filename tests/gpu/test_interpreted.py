"""The GPU executors without a GPU: their tests in a process of its own under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


def test_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1", "TOKENMILL_TUNING": "off", "CUDA_VISIBLE_DEVICES": ""}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-p",
        "no:cacheprovider",
        str(Path(__file__).with_name("test_executors.py")),
        str(Path(__file__).with_name("test_kv_memory.py")),
        str(Path(__file__).with_name("test_speculation.py")),
    ]
    result = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout, result.stdout


def test_a_machine_without_a_gpu_declines_with_a_reason_and_imports_no_triton() -> None:
    script = (
        "import sys; from tests.gpu.models import write_config; from pathlib import Path; import tempfile; "
        "from tokenmill import LLM; "
        "llm = LLM(write_config(Path(tempfile.mkdtemp())), load_format='dummy', context=32); "
        "declined = dict(llm.parts.runtime.declined_executors); "
        "assert 'NVIDIA' in declined['cuda_graph'] and 'NVIDIA' in declined['cuda_eager'], declined; "
        "assert 'triton' not in sys.modules"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    subprocess.run([sys.executable, "-c", script], cwd=_ROOT, env=environment, check=True)
