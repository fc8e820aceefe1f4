"""Stored KV pages that somebody has changed, tiers that are not there, and folders with two owners (S8, R6, R7)."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from benchmarks.tenant_keys import key_of
from tests.attacks.conftest import AttackedServer
from tests.attacks.tenant import streaming
from tests.e2e.serving import RunningServer, serving, wait_until
from tests.redis_server import RedisServer

_FLAGS = ("--context", "256", "--concurrency", "4")
_PROMPT = random.Random(7).choices(range(300, 30_000), k=120)
_NUM_PAGES = 14  # full pages of eight before the last token of the prompt
_OTHER = random.Random(8).choices(range(300, 30_000), k=120)


def _ask(server: RunningServer, prompt: list[int] = _PROMPT) -> tuple[str, int]:
    """The greedy answer, and how much of the prompt was cached."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    return whole["choices"][0]["text"], whole["usage"]["prompt_tokens_details"]["cached_tokens"]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x01
    path.write_bytes(data)


def _forge(path: Path, size: int | None = None) -> None:
    """As an attacker would who knows the format of pages without a key: other contents, or fewer of them, and a length
    and a checksum that fit. The header is 64 bytes of fields, the last eight are the length, then 16 of SHA-256."""
    data = path.read_bytes()
    page = bytes(255 - byte for byte in data[80:])[:size]
    fields = data[:56] + struct.pack("<Q", len(page))
    path.write_bytes(fields + hashlib.sha256(fields + page).digest()[:16] + page)


HARM: dict[str, Callable[[Path], object]] = {
    "flipped": _flip,
    "forged": _forge,
    "forged and shorter": lambda path: _forge(path, 1000),
    "shorter": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + bytes(1000)),
    "empty": lambda path: path.write_bytes(b""),
    "noise": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a link to nowhere": lambda path: (path.unlink(), path.symlink_to("/nonexistent/page")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.fixture(scope="module")
def model(model_path: Callable[[str], Path]) -> Path:
    return model_path("stories15m")


def _pages(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.kv") if path.is_file())


@dataclass(frozen=True)
class HarmedPages:
    """A server that was started again after the pages of some prompts had been changed; what it answered before."""

    server: RunningServer
    right: dict[str, str]


_REPLACED = ("forged", "forged and shorter", "shorter")
_PROMPTS = {name: random.Random(name).choices(range(300, 30_000), k=120) for name in ("each", *_REPLACED)}


@pytest.fixture(scope="module")
def harmed_pages(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HarmedPages]:
    """One prompt with each page harmed in another way, and one prompt for each way that all its pages are replaced."""
    folder = tmp_path_factory.mktemp("kv")
    right, pages = {}, {}
    with serving(model, *_FLAGS, "--kv-disk", str(folder)) as server:
        for name, prompt in _PROMPTS.items():
            before = set(_pages(folder))
            right[name], _ = _ask(server, prompt)
            wait_until(lambda before=before: len(set(_pages(folder)) - before) >= _NUM_PAGES, 20)
            pages[name] = sorted(set(_pages(folder)) - before)
    assert len(HARM) <= _NUM_PAGES
    for page, harm in zip(pages["each"], HARM.values(), strict=False):
        harm(page)
    for name in _REPLACED:
        for page in pages[name]:
            HARM[name](page)
    with serving(model, *_FLAGS, "--kv-disk", str(folder)) as server:
        yield HarmedPages(server, right)


def test_s8_changed_pages_on_disk_are_misses(harmed_pages: HarmedPages) -> None:
    """Each page of a prompt is harmed in another way; the answer stays the same and no step fails."""
    server = harmed_pages.server
    engine = server.load()["engine_pid"]
    assert _ask(server, _PROMPTS["each"])[0] == harmed_pages.right["each"]
    assert server.load()["engine_pid"] == engine
    server.wait_idle()


@pytest.mark.parametrize("name", _REPLACED)
def test_s8_a_page_with_right_checksums_is_not_believed(harmed_pages: HarmedPages, name: str) -> None:
    """All pages are replaced: the answer is the computed one."""
    assert _ask(harmed_pages.server, _PROMPTS[name]) == (harmed_pages.right[name], 0)
    harmed_pages.server.wait_idle()


@pytest.mark.slow
def test_s8_a_page_of_another_prompt_under_a_known_name_is_not_believed(model: Path, tmp_path: Path) -> None:
    flags = ("--kv-disk", str(tmp_path / "kv"))
    with serving(model, *_FLAGS, *flags) as server:
        right, _ = _ask(server)
        wait_until(lambda: len(_pages(tmp_path / "kv")) >= _NUM_PAGES, 20)
        first = set(_pages(tmp_path / "kv"))
        _ask(server, _OTHER)
    others = [page for page in _pages(tmp_path / "kv") if page not in first]
    for mine, other in zip(sorted(first), others, strict=False):
        mine.write_bytes(other.read_bytes())
    with serving(model, *_FLAGS, *flags) as server:
        assert _ask(server)[0] == right
        server.wait_idle()


def test_s8_changed_pages_in_redis_are_misses(model: Path, tmp_path: Path) -> None:
    redis_server = RedisServer(tmp_path)
    try:
        import redis

        client = redis.Redis(port=redis_server.port)
        flags = ("--kv-redis", redis_server.url)
        with serving(model, *_FLAGS, *flags) as server:
            right, _ = _ask(server)
            wait_until(lambda: client.dbsize() >= 10, 20)
        for number, name in enumerate(client.keys("*")):
            kind = client.type(name)
            value = client.get(name) if kind == b"string" else b"x"
            harmed = (value[:-1] + b"\x00", value[:50], value + b"x" * 99, os.urandom(len(value)), b"")[number % 5]
            client.set(name, harmed)
        client.lpush("noise", "list")
        with serving(model, *_FLAGS, *flags) as server:
            assert _ask(server)[0] == right
            server.wait_idle()
    finally:
        redis_server.stop()


class _NoisyRedis:
    """Accepts connections and answers every command with bytes that are no protocol, or with none."""

    ANSWERS = (b"$-5\r\n", b"*99999999\r\n", b"$99999999999\r\nx", os.urandom(200), b":1", b"+OK\r\n" * 50, b"")

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        number = 0
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            number += 1
            threading.Thread(target=self._answer, args=(connection, number), daemon=True).start()

    def _answer(self, connection: socket.socket, number: int) -> None:
        try:
            while connection.recv(65536):
                connection.sendall(self.ANSWERS[number % len(self.ANSWERS)])
        except OSError:
            pass

    def close(self) -> None:
        self._listening.close()


def test_s8_a_redis_that_talks_noise_stops_nobody(model: Path) -> None:
    noisy = _NoisyRedis()
    try:
        with serving(model, *_FLAGS, "--kv-redis", f"redis://127.0.0.1:{noisy.port}/0") as server:
            with streaming(server.url, None):
                _ask(server)
            server.wait_idle()
    finally:
        noisy.close()


def test_r6_a_redis_that_is_down_at_the_start_is_left_out(model: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with serving(model, *_FLAGS, "--kv-redis", f"redis://127.0.0.1:{port}/0") as server:
        assert _ask(server)[0]
        server.wait_idle()


def test_r6_an_engine_comes_back_while_redis_is_down(model: Path, tmp_path: Path) -> None:
    redis_server = RedisServer(tmp_path)
    try:
        with serving(model, *_FLAGS, "--kv-redis", redis_server.url) as server:
            right, _ = _ask(server)
            redis_server.stop()
            _replace_engine(server)
            assert _ask(server)[0] == right
            redis_server.start()
            assert _ask(server)[0] == right
            server.wait_idle()
    finally:
        redis_server.stop()


def test_r6_an_engine_comes_back_while_its_folder_is_gone(model: Path, tmp_path: Path) -> None:
    """A file where the folder was: as unusable as a full or read-only disk."""
    folder = tmp_path / "kv"
    with serving(model, *_FLAGS, "--kv-disk", str(folder)) as server:
        right, _ = _ask(server)
        folder.rename(tmp_path / "gone")
        folder.write_text("no folder")
        _replace_engine(server)
        assert _ask(server)[0] == right
        server.wait_idle()


def test_r6_a_redis_that_hangs_blocks_no_other_request(model: Path) -> None:
    """It accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as hung:
        port = hung.getsockname()[1]
        with serving(model, *_FLAGS, "--kv-redis", f"redis://127.0.0.1:{port}/0") as server:
            with streaming(server.url, None):
                for number in range(4):
                    _ask(server, [400 + number, *_PROMPT])
            server.wait_idle()


def test_r7_two_servers_share_a_folder(model: Path, tmp_path: Path) -> None:
    """Neither deletes what the other writes, and each reads what the other wrote."""
    flags = ("--kv-disk", str(tmp_path / "kv"))
    with serving(model, *_FLAGS, *flags) as first:
        right, _ = _ask(first)
        wait_until(lambda: len(_pages(tmp_path / "kv")) >= _NUM_PAGES, 20)
        unfinished = _pages(tmp_path / "kv")[0].parent / f"{os.getpid()}-7.part"
        unfinished.write_bytes(b"another process is writing this")
        with serving(model, *_FLAGS, *flags) as second:
            assert unfinished.exists(), "a start deleted a file that another process was writing"
            text, cached = _ask(second)
            assert text == right
            assert cached > 0
            other, _ = _ask(second, _OTHER)
            assert _ask(first, _OTHER)[0] == other
            first.wait_idle()
            second.wait_idle()


def _replace_engine(server: RunningServer) -> None:
    old = server.load()["engine_pid"]
    os.kill(old, 9)

    def back() -> bool:
        try:
            return server.load()["engine_pid"] not in (None, 0, old) and server.http.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    wait_until(back, 60)


@pytest.mark.slow
def test_s8_another_tenants_stream_goes_on_while_pages_are_changed(tiny_chat: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    server = AttackedServer(tiny_chat, tmp_path / "keys.json", "--kv-disk", str(folder))
    try:
        with streaming(server.url, key_of("good")) as tenant:
            for _ in range(3):
                for number, page in enumerate(_pages(folder)):
                    list(HARM.values())[number % 6](page)
                tenant.wait_for_answers(2)
        server.wait_idle()
    finally:
        server.stop()
