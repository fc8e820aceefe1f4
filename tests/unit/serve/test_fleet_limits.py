"""What bounds requests of several models: bytes that wait, bodies by the context of their model, slots for rows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.serve.test_fleet import _FACTS, Site, run, until
from tokenmill.serve.errors import ApiError
from tokenmill.serve.tenants.keys import Client


def test_bodies_that_wait_are_bounded_by_their_bytes() -> None:
    async def scenario(site: Site) -> None:
        a, b = site.hosts
        leave, tasks = asyncio.Event(), []

        def ask(client: Client, num_bytes: int) -> asyncio.Task[None]:
            async def asked() -> None:
                async with site.fleet.lease(b, client=client, num_bytes=num_bytes):
                    await leave.wait()

            return asyncio.create_task(asked())

        async with site.fleet.lease(a):
            for client, num_bytes in ((Client("k", max_queue_share=0.5), 3 << 20), (Client("l"), 4 << 20)):
                tasks.append(ask(client, num_bytes))
                await until(lambda: len(b.waiters) == len(tasks))
            with pytest.raises(ApiError) as refusal:
                await ask(Client("m"), 2 << 20)
            assert (refusal.value.status, refusal.value.code) == (429, "queue_full")
            with pytest.raises(ApiError) as refusal:
                await ask(Client("k", max_queue_share=0.25), 1 << 19)
            assert (refusal.value.status, refusal.value.code) == (429, "queue_share")
            tasks.append(ask(Client("m"), 1 << 20))
            await until(lambda: len(b.waiters) == 3)
        leave.set()
        await asyncio.gather(*tasks)
        assert not site.fleet._bytes_of

    run(Site(115, "a", "b"), scenario)


def test_a_body_may_be_as_long_as_the_largest_context_allows() -> None:
    async def scenario(site: Site) -> None:
        b = site.hosts[1]
        assert b.service is None
        b.facts = _FACTS
        assert site.hosts[0].body_limit("/v1/completions") == 1 << 20
        assert b.body_limit("/v1/completions") == (1 << 20) + 32 * _FACTS.context
        assert site.fleet.body_limit("/v1/completions") == b.body_limit("/v1/completions")

    run(Site(115, "a", "b"), scenario)


def test_a_row_waits_for_the_model_that_it_asks_for() -> None:
    async def scenario(site: Site) -> None:
        has_room, client = site.fleet.has_room, Client("k")
        first: Any = site.hosts[0].service
        assert has_room(client, None)
        first.takes_row = False
        assert not has_room(client, "a")
        assert not has_room(client, None)
        assert has_room(client, "b")  # it is loaded for it
        assert has_room(client, "nobody")  # refused at once
        assert not has_room(Client("poor"), "b")
        async with site.fleet.lease(site.hosts[1]):
            second: Any = site.hosts[1].service
            second.takes_row = False
            assert not has_room(client, "b")
            assert not has_room(client, "b:latest")

    run(Site(115, "a", "b"), scenario)
