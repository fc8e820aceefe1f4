"""Models in the caches of this disk: listed, measured and deleted; nothing else is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tokenmill.checkpoint.sources import aliases, list_downloaded
from tokenmill.checkpoint.sources.cache import model_folder
from tokenmill.checkpoint.sources.caches import bytes_here, remove
from tokenmill.cli import main as command
from tokenmill.errors import UserError

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches; the one of the Hub."""
    from huggingface_hub import constants

    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put_alias(name: str, size: int = 100) -> Path:
    alias = aliases()[name]
    folder = model_folder(alias)
    folder.mkdir(parents=True)
    (folder / alias.file).write_bytes(bytes(size))
    marker = {"fingerprint": alias.fingerprint, "source": "pypi:x", "files": {alias.file: size}}
    (folder / "verified.json").write_text(json.dumps(marker))
    return folder


def put_repository(hub: Path, repo: str, size: int = 200) -> Path:
    folder = hub / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / _COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(_COMMIT)
    (folder / "blobs").mkdir()
    (folder / "blobs" / "0").write_bytes(bytes(size))
    os.symlink("../../blobs/0", snapshot / "m-Q4_K_M.gguf")
    return folder


def test_what_is_here_is_listed(hub: Path) -> None:
    assert list_downloaded() == {}
    put_alias("smollm2")
    put_repository(hub, "org/some--name")
    (hub / "models--org--empty").mkdir()
    assert {name: found.bytes for name, found in list_downloaded().items()} == {"smollm2": 100, "org/some--name": 200}


def test_what_is_deleted_is_gone_and_nothing_else(hub: Path) -> None:
    folders = [
        put_alias("smollm2"),
        put_alias("stories15m"),
        put_repository(hub, "org/a"),
        put_repository(hub, "org/b"),
    ]
    assert remove("smollm2") > 100  # with its marker
    assert remove("org/a") >= 200
    assert [folder.exists() for folder in folders] == [False, True, False, True]
    for name in ("smollm2", "org/a", "../b", str(folders[1]), "", "models--org--b"):
        with pytest.raises(UserError):
            remove(name)
    assert [folder.exists() for folder in folders] == [False, True, False, True]


def test_how_much_of_a_model_is_here(hub: Path) -> None:
    assert bytes_here("smollm2") == (0, aliases()["smollm2"].bytes)
    put_alias("smollm2", size=5000)
    done, total = bytes_here("smollm2")
    assert 5000 < done < total
    put_repository(hub, "org/a")
    done, total = bytes_here("org/a")
    assert (done >= 200, total) == (True, 0)
    assert bytes_here("org/unknown") == (0, 0)


def test_list_and_rm(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_repository(hub, "org/a")
    assert command.main(["list", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["models"]
    assert (found["name"], found["bytes"]) == ("org/a", 200)
    assert command.main(["list"]) == 0
    assert "org/a" in capsys.readouterr().out
    assert command.main(["rm", "org/a"]) == 0
    assert "org/a" in capsys.readouterr().out
    assert command.main(["rm", "org/a"]) == 2
    assert "error: " in capsys.readouterr().err
    assert command.main(["list"]) == 0
    assert "No models" in capsys.readouterr().out
    assert command.main(["ps", "--url", "http://127.0.0.1:9"]) == 2
    assert "tokenmill serve" in capsys.readouterr().err
