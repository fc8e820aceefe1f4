"""Opening by content, and what is said about the things people give by mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.checkpoint.gguf_builder import write_model
from tests.unit.checkpoint.test_safetensors import CONFIG
from tokenmill.checkpoint.gguf import GGUFCheckpoint
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.safetensors import SafetensorsCheckpoint
from tokenmill.errors import CheckpointError


def test_gguf_whatever_its_name(tmp_path: Path) -> None:
    write_model(tmp_path / "weights.bin")
    assert isinstance(open_checkpoint(tmp_path / "weights.bin"), GGUFCheckpoint)
    assert isinstance(open_checkpoint(tmp_path), GGUFCheckpoint)  # the only one in its directory
    write_model(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF files \(other\.gguf, weights\.bin\)"):
        open_checkpoint(tmp_path)


def test_safetensors_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match="no weights"):
        open_checkpoint(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert isinstance(open_checkpoint(tmp_path), SafetensorsCheckpoint)
    with pytest.raises(CheckpointError, match="single safetensors file"):
        open_checkpoint(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("not json")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(tmp_path)


def test_pickled_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(CheckpointError, match="convert the weights to safetensors"):
            open_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello, this is a text file and not a model at all", "not a checkpoint"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"tjgg" + bytes(100), "before GGUF"),
        (b"GGUF", "only 4 bytes"),
        (b"GGUF" + b"\xff" * 100, "version"),
    ],
)
def test_other_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path / "model.gguf")
    assert caught.value.remedy


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="no files"):
        open_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="holds no model"):
        open_checkpoint(tmp_path)
