"""The supervisor: whatever ends an engine or keeps one from starting, it goes on, says why, and leaves nothing behind.

The engines are real processes without a model (fake_engine.py)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from tokenmill.config import EngineConfig
from tokenmill.engine.stats import EngineStats
from tokenmill.errors import UserError
from tokenmill.serve.errors import ApiError
from tokenmill.serve.generation import Generation, Member
from tokenmill.serve.supervision import engine_client, link, starting
from tokenmill.serve.supervision.engine_client import EngineClient
from tokenmill.types import Request, SamplingParams, TokenEvent


@pytest.fixture
def behaviour(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file that says how engines behave."""
    monkeypatch.setattr(link, "ENGINE_COMMAND", (sys.executable, str(Path(__file__).with_name("fake_engine.py"))))
    monkeypatch.setattr(link, "_DUMP_SECONDS", 0.0)
    monkeypatch.setattr(engine_client, "_FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(engine_client, "_MAX_BACKOFF", 0.05)
    monkeypatch.setattr(engine_client, "_SPARE_DELAY", 0.0)
    for module in (engine_client, starting):
        monkeypatch.setattr(module, "WATCH_SECONDS", 0.05)
    file = tmp_path / "behaviour"
    file.write_text("ready")
    return file


class Restarts:
    """An observer that counts, and fails."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def on_step(self, stats: EngineStats) -> None: ...

    def on_tokens(self, member: Member, num_tokens: int) -> None: ...

    def on_end(self, member: Member) -> None: ...

    def on_restart(self, reason: str) -> None:
        self.reasons.append(reason)
        raise ValueError("a fault of the observer")


@contextlib.asynccontextmanager
async def running(behaviour: Path, **options: Any) -> AsyncIterator[EngineClient]:
    stall_timeout = options.pop("stall_timeout", 30.0)
    client = EngineClient(behaviour, EngineConfig(), stall_timeout, lambda _: None, **options)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def answering(client: EngineClient) -> None:
    """Until the engine's sockets are connected: a fake engine is ready before that."""
    async with asyncio.timeout(30):
        while not (await client.ready())[0]:
            await asyncio.sleep(0.005)


async def connected(client: EngineClient) -> int:
    """Until all three sockets are; the number of open files then."""
    await answering(client)
    await until(lambda: client.heartbeat.activity)
    return open_files()


async def replaced(client: EngineClient, old: int | None) -> None:
    await until(lambda: client.state == "ready" and client.pid != old)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def exists(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class OneToken:
    """A collector for a request of one token."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs = None
        self.finish_reason: str | None = None
        self.outputs = [self]
        self.output = self

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def take(self, event: TokenEvent) -> tuple[str, bool]:
        self.token_ids += event.token_ids
        self.finish_reason = event.finish_reason
        return "", False


def submitted(client: EngineClient, name: str, deadline: float | None = None) -> Generation:
    generation = Generation(False, client.withdraw)
    generation.add(Request(name, [1], SamplingParams(), deadline=deadline), OneToken())  # type: ignore[arg-type]
    client.submit(generation)
    return generation


def test_restarts_leak_neither_descriptors_nor_processes(behaviour: Path) -> None:
    async def scenario() -> None:
        async with running(behaviour, keep_spare=True) as client:
            observer = Restarts()
            client.observe(observer)
            await until(lambda: client.spare_pid)
            before, pids = await connected(client), [client.pid, client.spare_pid]
            for _ in range(5):
                old, spare = client.pid, client.spare_pid
                os.kill(old or 0, signal.SIGKILL)
                await replaced(client, old)
                assert client.pid == spare  # it was waiting for that
                await until(lambda: client.spare_pid)
                pids.append(client.spare_pid)
            await until(lambda: open_files() <= before)
            assert observer.reasons == ["killed by SIGKILL"] * 5
            assert client.supervised
            await answering(client)
            generation = submitted(client, "a")
            assert (await generation.result())[0].outputs[0].token_ids == [1]
            generation.close()
        await until(lambda: not any(exists(pid) for pid in pids))

    asyncio.run(scenario())


def test_what_keeps_an_engine_from_starting_is_told_and_tried_again(behaviour: Path) -> None:
    async def scenario() -> None:
        async with running(behaviour) as client:
            old = client.pid
            behaviour.write_text("refuse")
            os.kill(old or 0, signal.SIGKILL)
            await until(lambda: "start 3 failed: the file is gone" in client.start_failure)
            is_ready, why = await client.ready()
            assert not is_ready
            assert "killed by SIGKILL" in why
            assert "the file is gone" in why
            assert client.supervised
            with pytest.raises(ApiError, match="restarting"):
                submitted(client, "a")
            behaviour.write_text("crash")
            await until(lambda: "exit code 3" in client.start_failure)
            behaviour.write_text("ready")
            await replaced(client, old)
            await answering(client)
            assert client.start_failure == ""

    asyncio.run(scenario())


@pytest.mark.parametrize("where", ["EngineLink", "spawn_engine"])
def test_the_supervisor_survives_any_exception(behaviour: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    faults: list[Exception] = [
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        zmq.ZMQError(errno.EMFILE, "Too many open files"),
        MemoryError(),
        KeyError("a bug of ours"),
    ]
    module: Any = engine_client if where == "EngineLink" else link
    good = getattr(module, where)

    def faulty(*arguments: Any) -> Any:
        if faults:
            raise faults.pop(0)
        return good(*arguments)

    async def scenario() -> None:
        async with running(behaviour) as client:
            old, before = client.pid, await connected(client)
            monkeypatch.setattr(module, where, faulty)
            os.kill(old or 0, signal.SIGKILL)
            await replaced(client, old)
            assert faults == []
            await until(lambda: open_files() <= before)

    asyncio.run(scenario())


def test_a_watch_that_fails_ends_in_a_new_engine(behaviour: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with running(behaviour) as client:
            old = client.pid
            look = client._watchdog.look

            def broken(*_: Any) -> str | None:
                monkeypatch.setattr(client._watchdog, "look", look)
                raise RuntimeError("a bug of ours")

            monkeypatch.setattr(client._watchdog, "look", broken)
            await replaced(client, old)
            await until(lambda: not exists(old))
            assert "a bug of ours" in client.reason

    asyncio.run(scenario())


def test_a_hang_outside_a_step_is_named_and_ended(behaviour: Path) -> None:
    async def scenario() -> None:
        behaviour.write_text("hang")
        async with running(behaviour, stall_timeout=1.0) as client:
            old = client.pid
            behaviour.write_text("ready")
            await replaced(client, old)
            assert client.reason.startswith("stuck: taking grammars does not end, after 1.")

    asyncio.run(scenario())


def test_a_frozen_engine_is_replaced(behaviour: Path) -> None:
    async def scenario() -> None:
        async with running(behaviour, stall_timeout=1.0) as client:
            old = client.pid
            os.kill(old or 0, signal.SIGSTOP)
            await replaced(client, old)
            assert client.reason.startswith("stuck: no sign of life")
            assert not exists(old)

    asyncio.run(scenario())


def test_closing_while_the_engine_starts_leaves_no_process(behaviour: Path) -> None:
    async def scenario() -> None:
        behaviour.write_text("silent")
        client = EngineClient(behaviour, EngineConfig(), 30.0, lambda _: None)
        starting = asyncio.ensure_future(client.start())
        await until(lambda: client.pid)
        pid = client.pid
        starting.cancel()
        async with asyncio.timeout(2.0):
            await client.close()
        await until(lambda: not exists(pid))
        assert not client._folder.exists()

    asyncio.run(scenario())


def test_closing_during_a_restart_leaves_no_process(behaviour: Path) -> None:
    async def scenario() -> None:
        async with running(behaviour) as client:
            old = client.pid
            behaviour.write_text("silent")
            os.kill(old or 0, signal.SIGKILL)
            await until(lambda: client.state == "restarting" and client.pid not in (old, None))
            pid = client.pid
        await until(lambda: not exists(pid))

    asyncio.run(scenario())


def test_the_children_of_an_engine_end_with_it(behaviour: Path) -> None:
    async def scenario() -> None:
        behaviour.write_text("parent")
        async with running(behaviour) as client:
            old = client.pid
            child = int(Path(f"{behaviour}.child").read_text())
            assert exists(child)
            behaviour.write_text("ready")
            os.kill(old or 0, signal.SIGKILL)
            await replaced(client, old)
            await until(lambda: not exists(child) or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2])

    asyncio.run(scenario())


def test_a_first_engine_that_does_not_start_raises(behaviour: Path) -> None:
    async def scenario() -> None:
        behaviour.write_text("refuse")
        with pytest.raises(UserError, match="the file is gone"):
            async with running(behaviour):
                pass
        behaviour.write_text("crash")
        with pytest.raises(RuntimeError, match="exit code 3"):
            async with running(behaviour):
                pass

    asyncio.run(scenario())


def test_a_request_that_the_engine_drops_at_its_deadline_is_429(behaviour: Path) -> None:
    async def scenario() -> None:
        async with running(behaviour) as client:
            await answering(client)
            generation = submitted(client, "late", deadline=1.0)
            with pytest.raises(ApiError) as caught:
                await generation.result()
            assert (caught.value.status, caught.value.code) == (429, "deadline")
            generation.close()
            assert client.num_in_flight == 0

    asyncio.run(scenario())
