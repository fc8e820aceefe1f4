"""The engine process by itself, over its sockets: bad messages are answered and harm nobody."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenmill.config import EngineConfig
from tokenmill.engine import messages
from tokenmill.engine.messages import Cancel, Events, FromEngine, Ready, Refused, Submit
from tokenmill.serve.supervision.link import EngineLink
from tokenmill.types import Request, SamplingParams


def _request(name: str, **fields: Any) -> Submit:
    return Submit.of(Request(name, [1, 306], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True), **fields))


class _Engine:
    """A link whose messages are kept."""

    def __init__(self, folder: Path) -> None:
        self.news: list[FromEngine] = []
        self._changed = asyncio.Event()
        self.link = EngineLink(folder, 1, self._take)

    def _take(self, message: FromEngine) -> None:
        self.news.append(message)
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await self._changed.wait()
                self._changed.clear()

    def refusals(self, name: str) -> list[str]:
        return [each.message for each in self.news if isinstance(each, Refused) and each.request_id == name]

    def tokens(self, name: str) -> list[int]:
        events = [event for each in self.news if isinstance(each, Events) for event in each.events]
        return [token for event in events if event.request_id == name for token in event.token_ids]


async def _talk(model: Path, folder: Path) -> None:
    engine = _Engine(folder)
    link = engine.link
    try:
        await link.launch(str(model), EngineConfig(context=64, concurrency=2))
        await engine.until(lambda: any(isinstance(each, Ready) for each in engine.news))
        link.send(_request("good"))
        await engine.until(lambda: len(engine.tokens("good")) == 3)

        for data in (b"", b"\xff" * 50, b"\x93\x01\x02", msgspec.msgpack.encode({"type": "submit", "request_id": 5})):
            link._outbox.send(data)
        await engine.until(lambda: len(engine.refusals("")) == 4)
        raw = msgspec.msgpack.decode(messages.encode(_request("hot")))
        raw["params"]["temperature"] = -1.0
        link._outbox.send(msgspec.msgpack.encode(raw))
        await engine.until(lambda: len(engine.refusals("")) == 5)

        for name, bad in (
            ("ids", {"prompt_ids": [1, 10**6]}),
            ("empty", {"prompt_ids": []}),
            ("long", {"prompt_ids": [1] * 65}),
        ):
            link.send(msgspec.structs.replace(_request(name), **bad))
            await engine.until(lambda name=name: len(engine.refusals(name)) == 1)  # type: ignore[misc]
        link.send(msgspec.structs.replace(_request("light"), weight=0.0))
        await engine.until(lambda: len(engine.refusals("light")) == 1)

        for _ in range(2):
            link.send(msgspec.structs.replace(_request("twice"), params=SamplingParams(max_tokens=60, ignore_eos=True)))
        await engine.until(lambda: len(engine.refusals("twice")) == 1)
        link.send(Cancel("twice"))
        link.send(Cancel("never there", 3))

        assert await link.ping(10)
        link.send(_request("again"))
        await engine.until(lambda: len(engine.tokens("again")) == 3)
        assert engine.tokens("again") == engine.tokens("good")
        last = next(each for each in reversed(engine.news) if isinstance(each, Events))
        assert (last.stats.num_running, last.stats.num_pages_held) == (0, 0)
        assert last.stats.pages_consistent
    finally:
        await link.stop(5)


def test_bad_messages_harm_nobody(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    asyncio.run(_talk(model_path("stories15m"), tmp_path))


_WITHOUT_FILES = """
import asyncio, os, resource, sys
from pathlib import Path
from tokenmill.config import EngineConfig
from tokenmill.engine.messages import Ready
from tokenmill.serve.supervision.link import EngineLink, spawn_engine

async def main(model, folder):
    ready = asyncio.Event()
    spare = await spawn_engine()
    link = EngineLink(folder, 1, lambda message: ready.set() if isinstance(message, Ready) else None)
    limit = max(int(name) for name in os.listdir("/proc/self/fd")) + 9
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        pass
    try:
        await link.launch(model, EngineConfig(context=64, concurrency=2), spare)
        async with asyncio.timeout(60):
            while not (folder / "heartbeats1").exists():
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)  # the time in which it must not give up
        assert not ready.is_set()
        for file in taken:
            os.close(file)
        async with asyncio.timeout(60):
            await ready.wait()
    finally:
        await link.stop(5)
    print("ready")

asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_a_server_without_open_files_lives_and_reaches_its_engine_later(
    model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """In a process of its own, whose open files are limited: libzmq would abort it if it had to accept a connection."""
    command = [sys.executable, "-c", _WITHOUT_FILES, str(model_path("stories15m")), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "ready"), ended.stderr[-2000:]
