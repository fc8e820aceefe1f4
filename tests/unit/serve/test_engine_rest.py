"""Engines that nobody needs for a while: asleep, stopped, started again, and what goes wrong with it. Real processes
without a model, as in test_engine_client.py."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.unit.serve import test_engine_client
from tests.unit.serve.test_engine_client import answering, exists, running, submitted, until
from tokenmill.serve.errors import ApiError
from tokenmill.serve.supervision.spare import SpareEngine

behaviour = test_engine_client.behaviour  # the fixture


def test_an_engine_sleeps_wakes_stops_and_starts_again(behaviour: Path) -> None:
    async def scenario() -> None:
        async with running(behaviour) as client:
            stops: list[str] = []
            client.on_stopped = lambda: stops.append(client.state)
            await answering(client)
            process = client.pid
            assert await client.rest(True) == 5
            assert (client.state, client.supervised, client.pid) == ("asleep", True, process)
            with pytest.raises(ApiError):
                submitted(client, "a")
            assert await client.rest(False) == 0
            assert (await submitted(client, "b").result())[0].outputs[0].token_ids == [1]
            for state in ("ready", "asleep"):
                if state == "asleep":
                    await client.rest(True)
                assert client.state == state
                process = client.pid
                await client.stop()
                assert (client.state, client.supervised, client.pid) == ("stopped", True, None)
                assert not exists(process)
                assert (await client.ready())[0] is False
                await client.start()
                await answering(client)
                assert client.pid != process
            assert stops == ["stopped", "stopped"]

    asyncio.run(scenario())


def test_an_engine_that_dies_asleep_is_not_replaced_until_it_is_needed(behaviour: Path) -> None:
    async def scenario() -> None:
        async with running(behaviour) as client:
            await answering(client)
            await client.rest(True)
            os.kill(client.pid or 0, signal.SIGKILL)
            await until(lambda: client.state == "stopped")
            assert client.supervised
            await client.start()
            assert client.state == "ready"

    asyncio.run(scenario())


def test_an_engine_that_cannot_sleep_stays_and_one_that_cannot_wake_ends(behaviour: Path) -> None:
    async def scenario() -> None:
        behaviour.write_text("sleepless")
        async with running(behaviour) as client:
            await answering(client)
            with pytest.raises(RuntimeError, match="no disk"):
                await client.rest(True)
            assert client.state == "ready"
        behaviour.write_text("restless")
        async with running(behaviour) as client:
            await answering(client)
            await client.rest(True)
            with pytest.raises(RuntimeError, match="exit code 4"):
                await client.rest(False)
            assert client.state == "stopped"

    asyncio.run(scenario())


def test_several_engines_share_a_spare_process(behaviour: Path) -> None:
    async def scenario() -> None:
        spare = SpareEngine()
        try:
            async with running(behaviour, keep_spare=True, spare=spare) as one:
                await until(lambda: spare.pid)
                waiting = spare.pid
                async with running(behaviour, keep_spare=True, spare=spare) as two:
                    assert two.pid == waiting
                    await until(lambda: spare.pid not in (None, waiting))
                    assert one.spare_pid == two.spare_pid == spare.pid
                waiting = spare.pid
            assert exists(waiting)  # it belongs to nobody of them
        finally:
            await spare.close()
        await until(lambda: not exists(waiting))

    asyncio.run(scenario())
