"""What the tokenizer remembers of texts is bounded, and where nothing splits the text it is nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_GROWTH = """
import random, sys
from pathlib import Path
from tokenmill.checkpoint.hf_tokenizer import build_tokenizer

tokenizer = build_tokenizer(Path(sys.argv[1]), None)
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
def encode(count):
    for _ in range(count):
        tokenizer.encode("".join(random.choice("abcdefg hij") for _ in range(200)))
encode(4000)  # what loading has freed is used again first
before = resident()
encode(5000)
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_prompts_are_not_remembered(model_path: Callable[[str], Path]) -> None:
    """Llama's tokenizer takes a text as one word: 5,000 of them were 36 MiB in the library's cache."""
    definition = next(model_path("stories15m").rglob("tokenizer.json"))
    command = [sys.executable, "-c", _GROWTH, str(definition)]
    grown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(grown.stdout) < 4 << 20
