"""Every script in examples/ runs as its first lines say, on the smallest model that shows its point."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
# Script -> (model, what its output must match). No model: the script needs no weights.
EXPECTED = {
    "generate": ("stories15m", r"(?s)'Once upon a time' -> '.+\(24 tokens, length\).*'The little dog' -> "),
    "logprobs": ("stories15m", r"(?s)' some bread\.': log-probability -\d.*most likely next tokens.*\d+ '"),
    "semantic_search": ("minilm", r"(?s)make dough\? -> Bread is.*rise and fall\? -> The moon"),
    "chat_streaming": ("smollm2", r"(?s)\[What is the capital of France\?\].*Name a colour of the rainbow\.\n  \w+"),
    "openai_client": ("smollm2", r"\d+ tokens in, \d+ out"),
    "structured_output": ("smollm2", r"name '.+', age \d+\nTim was (happy|sad)"),
    "quantize_and_gate": ("stories15m", r"(?s)8 bits, kept: .*little girl.*3 bits, the quantized model is refused"),
    "divergence": ("stories15m", r"against itself: mean divergence \d\.\d+e-(09|1\d), same top token 100\.0%"),
    "kv_and_speculation": ("stories15m", r"(?s)drafted [1-9]\d* tokens, .*the same tokens"),
    "plan_deployment": ("", r"(?s)h100x1: \w+ weights on .*l40sx1: .*per million output tokens"),
    "simulate_trace": ("", r"(?s)speed-up 2: TTFT .*speed-up 8: TTFT "),
    "custom_drafter": ("stories15m", r"(?s)[1-9]\d* of \d+ drafted tokens held\nthe same tokens"),
    "custom_order": ("stories15m", r"prompt tokens: \[7, 32, 62\]"),
}


def test_every_example_is_listed() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(EXPECTED)
    listed = set(re.findall(r"\((\w+)\.py\)", (FOLDER / "README.md").read_text()))
    assert listed == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_is_short(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 50


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_runs(name: str, model_path: Callable[[str], Path], tmp_path: Path) -> None:
    model, pattern = EXPECTED[name]
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    if model:
        model_path(model)
        command.append(model)
    if name == "quantize_and_gate":
        command.append(str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(pattern, done.stdout), done.stdout
