"""The GPU executors without a GPU: their tests in a process of their own under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreter import assert_passes_interpreted

_ROOT = Path(__file__).parents[2]


# On a GPU all of them run in seconds; interpreted, those marked slow take half of the time of all GPU tests.
_FILES = ["executors", "kv_memory", "adapters", "drawn_steps"]
_SLOW_FILES = [
    "speculation",
    "encoders",
    "packed_pages",
    "draft_heads",
    "inspect",
    "host_experts",
    "recurrent",
    "simulated_drafts",
]


@pytest.mark.parametrize(
    "names", [pytest.param(_FILES, id="quick"), pytest.param(_SLOW_FILES, id="slow", marks=pytest.mark.slow)]
)
def test_under_the_interpreter(names: list[str], pytestconfig: pytest.Config) -> None:
    assert_passes_interpreted(pytestconfig, *(Path(__file__).with_name(f"test_{name}.py") for name in names))


def test_every_file_is_run() -> None:
    present = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    needs_a_gpu = {"on_device", "real_model", "tier_pages", "calibration", "optimize", "rank_groups"}
    assert present == {*_FILES, *_SLOW_FILES, *needs_a_gpu, "interpreted"}


def test_a_machine_without_a_gpu_declines_with_a_reason_and_imports_no_triton(tmp_path: Path) -> None:
    script = (
        "import sys; from tests.gpu.models import write_config; from pathlib import Path; "
        "from tokenmill import LLM; "
        f"llm = LLM(write_config(Path({str(tmp_path)!r})), load_format='dummy', context=32); "
        "declined = dict(llm.parts.runtime.declined_executors); "
        "assert 'NVIDIA' in declined['cuda_graph'] and 'NVIDIA' in declined['cuda_eager'], declined; "
        "assert 'triton' not in sys.modules"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    subprocess.run([sys.executable, "-c", script], cwd=_ROOT, env=environment, check=True)
