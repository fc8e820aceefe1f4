"""The GPU executors without a GPU: their tests in a process of its own under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.interpreter import assert_passes_interpreted

_ROOT = Path(__file__).parents[2]


def test_under_the_interpreter() -> None:
    names = ("executors", "kv_memory", "packed_pages", "speculation", "draft_heads", "inspect")
    assert_passes_interpreted(*(Path(__file__).with_name(f"test_{name}.py") for name in names))


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
