"""Of each key one request at a time is prepared, and nobody who is gone keeps the turn."""

import asyncio

import pytest

from tokenmill.serve.tenants import turns as turns_module
from tokenmill.serve.tenants.keys import Client
from tokenmill.serve.tenants.turns import Turns


def test_a_crowd_of_one_key_does_not_come_before_another_key() -> None:
    async def run() -> list[str]:
        turns, order = Turns(), list[str]()
        crowd, single = Client("crowd"), Client("single")

        async def request(client: Client) -> None:
            await turns.take(client)
            order.append(client.name)

        many = [asyncio.create_task(request(crowd)) for _ in range(50)]
        one = asyncio.create_task(request(single))
        await asyncio.gather(*many, one)
        return order

    order = asyncio.run(run())
    assert order.index("single") <= 1
    assert order.count("crowd") == 50


def test_those_who_leave_pass_the_turn_on() -> None:
    async def run() -> int:
        turns, client, served = Turns(), Client("a"), 0

        async def request() -> None:
            nonlocal served
            await turns.take(client)
            served += 1

        tasks = [asyncio.create_task(request()) for _ in range(20)]
        await asyncio.sleep(0)
        for task in tasks[1::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait_for(turns.take(client), 1)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not turns._waiting
        return served

    assert asyncio.run(run()) == 10


def test_the_one_that_has_just_been_given_the_turn_may_leave() -> None:
    async def run() -> list[str]:
        turns, client, order = Turns(), Client("a"), list[str]()

        async def request(name: str) -> None:
            await turns.take(client)
            order.append(name)

        tasks = [asyncio.create_task(request(name)) for name in "abc"]
        await asyncio.sleep(0)  # all have asked, a has had its turn
        asyncio.get_running_loop().call_soon(tasks[1].cancel)
        await asyncio.gather(*tasks, return_exceptions=True)
        return order

    assert asyncio.run(run())[-1] == "c"


def test_a_crowd_rests_between_its_turns_while_others_send_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "_REST", 1e9)
    monkeypatch.setattr(turns_module, "_MAX_REST", 1e9)

    async def run(others: bool) -> int:
        turns, crowd, served = Turns(), Client("crowd"), 0

        async def request() -> None:
            nonlocal served
            await turns.take(crowd)
            served += 1

        if others:
            await turns.take(Client("single"))
        tasks = [asyncio.create_task(request()) for _ in range(5)]
        for _ in range(50):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        return served

    assert asyncio.run(run(others=True)) == 1
    assert asyncio.run(run(others=False)) == 5
