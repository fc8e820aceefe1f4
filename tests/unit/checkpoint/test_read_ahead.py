"""Weight files are brought into the page cache, if they fit."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from tokenmill.checkpoint import read_ahead as module
from tokenmill.checkpoint.read_ahead import read_ahead, weight_files

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system has no posix_fadvise")


def test_the_files_of_a_checkpoint(tmp_path: Path) -> None:
    for name in ("config.json", "model-2.safetensors", "model-1.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"x")
    assert [each.name for each in weight_files(tmp_path)] == ["model-1.safetensors", "model-2.safetensors"]
    assert weight_files(tmp_path / "model-1.safetensors") == [tmp_path / "model-1.safetensors"]
    assert weight_files(tmp_path / "nothing") == []


def test_every_byte_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (20 << 20) + 5
    (tmp_path / "model.safetensors").write_bytes(bytes(size))
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _file, begin, length, _advice: asked.append((begin, length)))
    reading = read_ahead(tmp_path)
    assert reading is not None
    reading.join()
    assert asked[0][0] == 0
    assert all(begin + length == then for (begin, length), (then, _) in itertools.pairwise(asked))
    assert sum(asked[-1]) >= size


def test_what_would_not_fit_is_left_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(bytes(1000))
    monkeypatch.setattr(module, "available_memory", lambda: 1000)
    assert read_ahead(tmp_path) is None
    assert read_ahead(tmp_path / "nothing") is not None  # nothing to read is no reason to complain
