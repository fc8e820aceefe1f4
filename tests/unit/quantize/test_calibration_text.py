"""Calibration text: every kind of file gives sequences; what was used is not what the gate measures on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.checkpoint.tokenizer_files import load_chat_template, load_tokenizer
from tokenmill.errors import UserError
from tokenmill.quantize.calibration_text import DEFAULT_ORIGIN, read_calibration
from tokenmill.runtime.observation.default_text import default_text


@pytest.fixture(scope="module")
def tokenizer(model_path: Callable[[str], Path]) -> Tokenizer:
    return load_tokenizer(model_path("smollm2"))


def test_plain_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    lines = [f"Line {number} says that {number * 7} is a number worth writing down.\n" for number in range(400)]
    path.write_text("".join(lines))
    found = read_calibration(path, tokenizer, None, 8, 32)
    assert found.sequences.shape == (8, 32)
    assert found.origin == "text.txt"
    decoded = [tokenizer.decode(row.tolist()) for row in found.sequences]
    assert "Line 0 " in decoded[0]
    used = "".join(decoded)
    held_out = [line for line in found.held_out.splitlines() if line.strip()]
    assert held_out == [line.rstrip("\n") for line in lines[-len(held_out) :]]
    assert not any(line in used for line in held_out)
    again = read_calibration(path, tokenizer, None, 8, 32)
    assert again.digest == found.digest
    assert read_calibration(path, tokenizer, None, 9, 32).digest != found.digest


def test_chats_and_texts(tokenizer: Tokenizer, model_path: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    chat = {"messages": [{"role": "user", "content": "What is rain?"}, {"role": "assistant", "content": "Water."}]}
    path.write_text("\n".join(json.dumps(entry) for entry in [chat, {"text": "Plain words."}] * 20))
    template = load_chat_template(model_path("smollm2"))
    found = read_calibration(path, tokenizer, template, 4, 48)
    text = "".join(tokenizer.decode(row.tolist(), skip_special_tokens=False) for row in found.sequences)
    assert "<|im_start|>user\nWhat is rain?<|im_end|>" in text
    assert "Plain words." in text
    with pytest.raises(UserError, match="no chat template"):
        read_calibration(path, tokenizer, None, 4, 48)


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "is not JSON"), ('{"prompt": "x"}', "neither text nor messages"), ("[1]", "neither text nor messages")],
)
def test_bad_lines(line: str, message: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(UserError, match=f"line 2 .*{message}"):
        read_calibration(path, tokenizer, None, 1, 8)


def test_too_short_says_what_is_needed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("one two three four five six seven eight nine ten " * 20)
    with pytest.raises(UserError, match=r"tokens; 128 sequences of 64 need 8192.*or --calibration-samples \d"):
        read_calibration(path, tokenizer, None, 128, 64)
    with pytest.raises(UserError, match="cannot read"):
        read_calibration(tmp_path / "none.txt", tokenizer, None, 1, 8)
    with pytest.raises(UserError, match="from 1"):
        read_calibration(path, tokenizer, None, 0, 64)


def test_a_text_with_nothing_to_spare_leaves_the_gate_the_built_in_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "exact.txt"
    path.write_text("alpha beta gamma delta\n" * 40)
    count = len(tokenizer.encode(path.read_text()))
    found = read_calibration(path, tokenizer, None, count // 8, 8)
    assert "alpha beta" not in found.held_out


def test_built_in_text(tokenizer: Tokenizer) -> None:
    found = read_calibration(None, tokenizer, None, 16, 64)
    assert (found.origin, tuple(found.sequences.shape)) == (DEFAULT_ORIGIN, (16, 64))
    assert len({tuple(row) for row in found.sequences.tolist()}) == 16
    assert torch.equal(found.sequences, read_calibration(None, tokenizer, None, 16, 64).sequences)
    text = default_text(100_000)
    assert len(text.encode()) >= 100_000
    assert default_text(100_000) == text != default_text(100_000, seed=1)
    assert "def running_mean" in text
    assert "Bahnhof" in text
