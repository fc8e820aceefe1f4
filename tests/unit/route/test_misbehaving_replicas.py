"""The router in front of replicas that lose events, restart, refuse, hang, and break off streams."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest

from tests.unit.route.fakes import PAGE, FakeReplica, Router, routed, said, token
from tokenmill.engine.kv.page_names import page_names
from tokenmill.route.config import RouteConfig
from tokenmill.route.fleet import Fleet
from tokenmill.route.prompt import Prompt

_IDS = list(range(20, 36))
_BODY = {"model": "fake", "prompt": _IDS, "max_tokens": 10, "stream": True, "seed": 5}
_WHOLE = "".join(f" {token(5, position)}" for position in range(10))


def _run(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await work

    asyncio.run(limited())


async def _ask(router: Router, **changes: Any) -> Any:
    return await router.client.post("/v1/completions", json={**_BODY, **changes})


def _first_to_fail(replicas: tuple[FakeReplica, ...], behaviour: str) -> FakeReplica:
    """Have the replica that has the prompt cached, and so comes first, misbehave."""
    replicas[1].store(_IDS)
    replicas[1].behaviour = behaviour
    return replicas[1]


@pytest.mark.parametrize("behaviour", ["503", "429", "cut_before", "cut_after", "error_event"])
def test_a_stream_goes_on_elsewhere(behaviour: str) -> None:
    async def work() -> None:
        replicas = FakeReplica(), FakeReplica(), FakeReplica()
        async with routed(*replicas) as router:
            bad = _first_to_fail(replicas, behaviour)
            await router.until(lambda: len(router.fleet.replicas[1].pages.stored) == 4)
            answer = await _ask(router)
            assert (answer.status_code, said(answer.text)) == (200, (_WHOLE, True))
            assert len(bad.bodies) == 1
            begun = behaviour in ("cut_after", "error_event")
            other = next(each for each in replicas if each is not bad and each.bodies)
            assert other.bodies[0].get("resume_token_ids") == (
                [token(5, 0), token(5, 1), token(5, 2)] if begun else None
            )
            assert router.metrics.resumed._value.get() == begun
            assert router.idle()

    _run(work())


def test_a_stream_without_a_seed_gets_one_for_all_its_replicas() -> None:
    async def work() -> None:
        replicas = FakeReplica(), FakeReplica()
        async with routed(*replicas) as router:
            for each in replicas:
                each.behaviour, each.cut_at, each.cut_again = "cut_after", 4, 4
            answer = await _ask(router, seed=None, temperature=1.0)
            seeds = {body["seed"] for each in replicas for body in each.bodies}
            assert len(seeds) == 1
            seed = seeds.pop()
            assert said(answer.text)[0] == "".join(f" {token(seed, position)}" for position in range(10))

    _run(work())


def test_only_the_end_of_a_stream_is_missing() -> None:
    async def work() -> None:
        replica = FakeReplica()
        async with routed(replica) as router:
            replica.behaviour = "cut_at_end"
            answer = await _ask(router, stream_options={"include_usage": True})
            assert said(answer.text) == (_WHOLE, True)
            assert '"completion_tokens":10' in answer.text
            assert len(replica.bodies) == 1

    _run(work())


def test_a_stream_that_nobody_can_go_on_with_says_so() -> None:
    async def work() -> None:
        replica = FakeReplica()
        async with routed(replica, resume_timeout=0.2) as router:
            replica.behaviour, replica.cut_at = "cut_after", 0
            answer = await _ask(router)  # before its first token: nothing was sent, so it is a status
            assert answer.status_code == 503
            replica.behaviour, replica.cut_at, replica.cut_again = "error_event", 3, 0
            text = (await _ask(router)).text
            assert '"code":"replica_lost"' in text
            assert said(text)[0] == "".join(f" {token(5, position)}" for position in range(3))
            assert len(replica.bodies) > 2  # it was asked again for as long as that may take
            assert router.idle()

    _run(work())


def test_a_stream_that_stands_still_goes_on_elsewhere() -> None:
    """Its replica answers events and sends pings, but no tokens."""

    async def work() -> None:
        replicas = FakeReplica(), FakeReplica()
        async with routed(*replicas, resume_timeout=0.3) as router:
            _first_to_fail(replicas, "freeze")
            await router.until(lambda: len(router.fleet.replicas[1].pages.stored) == 4)
            assert said((await _ask(router)).text) == (_WHOLE, True)
            assert replicas[0].bodies[0]["resume_token_ids"] == [token(5, position) for position in range(3)]
            assert router.fleet.replicas[1].up
            assert router.idle()

    _run(work())


@pytest.mark.parametrize("number", [1, 2])
def test_a_stream_that_stands_still_everywhere_ends(number: int) -> None:
    async def work() -> None:
        replicas = [FakeReplica() for _ in range(number)]
        async with routed(*replicas, resume_timeout=0.3) as router:
            for each in replicas:
                each.behaviour, each.cut_again = "freeze", 0
            text = (await _ask(router)).text
            assert '"code":"replica_lost"' in text
            assert said(text)[0] == "".join(f" {token(5, position)}" for position in range(3))
            assert sum(len(each.bodies) for each in replicas) == 2
            assert router.idle()

    _run(work())


def test_complete_answers_are_asked_for_again() -> None:
    async def work() -> None:
        replicas = FakeReplica(), FakeReplica()
        async with routed(*replicas) as router:
            _first_to_fail(replicas, "cut_before")
            await router.until(lambda: len(router.fleet.replicas[1].pages.stored) == 4)
            answer = await _ask(router, stream=False)
            assert answer.json()["choices"][0]["text"] == str([token(5, position) for position in range(10)])

    _run(work())


def test_what_is_wrong_with_a_request_is_not_tried_elsewhere() -> None:
    async def work() -> None:
        replicas = FakeReplica(), FakeReplica()
        async with routed(*replicas) as router:
            for each in replicas:
                each.behaviour = "400"
            answer = await _ask(router)
            assert answer.status_code == 400
            assert sum(len(each.bodies) for each in replicas) == 1

    _run(work())


def test_the_last_refusal_reaches_the_caller_or_the_upstream_takes_over() -> None:
    async def work() -> None:
        replicas = FakeReplica(), FakeReplica()
        upstream = FakeReplica()
        async with routed(*replicas) as router:
            for each in replicas:
                each.behaviour = "429"
            answer = await _ask(router, stream=False)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        async with upstream:
            options = {"upstream": upstream.url, "upstream_key": "theirs", "upstream_model": "big"}
            async with routed(*replicas, **options) as router:
                call = {**_BODY, "stream": False}
                headers = {"authorization": "Bearer mine", "x-api-key": "mine too", "cookie": "c"}
                answer = await router.client.post("/v1/completions", json=call, headers=headers)
                assert answer.status_code == 200
                assert upstream.bodies == [{**call, "model": "big"}]
                assert upstream.headers[0]["authorization"] == "Bearer theirs"
                assert not {"cookie", "x-api-key"} & upstream.headers[0].keys()

    _run(work())


def test_callers_keys_and_unknown_fields_go_along() -> None:
    async def work() -> None:
        replica = FakeReplica()
        async with routed(replica) as router:
            headers = {"authorization": "Bearer tenant-a", "x-request-id": "r1"}
            body = {**_BODY, "kv_source": "10.0.0.7:9000"}
            await router.client.post("/v1/completions", json=body, headers=headers)
            assert replica.headers[0]["authorization"] == "Bearer tenant-a"
            assert replica.headers[0]["x-request-id"] == "r1"
            assert replica.bodies[0]["kv_source"] == "10.0.0.7:9000"

    _run(work())


def test_lost_events_are_made_good_by_a_snapshot() -> None:
    async def work() -> None:
        replica = FakeReplica()
        async with routed(replica) as router:
            target = router.fleet.replicas[0]
            replica.store(_IDS[:4])
            await router.until(lambda: len(target.pages.stored) == 1)
            before = replica.snapshots
            replica.store(_IDS)
            replica.store(list(range(60, 72)))
            del replica.changes[-2]  # one of them never arrives
            await router.until(lambda: target.pages.stored == set(replica.names))
            assert target.num_gaps == 1
            assert replica.snapshots == before + 1
            replica.remove(page_names(replica.root, _IDS, PAGE)[2:])
            await router.until(lambda: target.pages.stored == set(replica.names))
            assert target.num_gaps == 1

    _run(work())


def test_a_replica_that_comes_back_with_another_root_is_another_pool() -> None:
    async def work() -> None:
        replicas = FakeReplica(), FakeReplica()
        async with routed(*replicas) as router:
            target = router.fleet.replicas[1]
            replicas[1].store(_IDS)
            await router.until(lambda: len(target.pages.stored) == 4)
            prompt = Prompt(_IDS)
            assert target.matched_tokens(prompt) == 16
            replicas[1].restart(b"another model")
            await router.until(lambda: target.root == b"another model")
            assert (target.pages.stored, target.matched_tokens(prompt)) == (set(), 0)
            replicas[1].store(_IDS)  # the same tokens under another root
            await router.until(lambda: target.matched_tokens(prompt) == 16)
            assert router.fleet.replicas[0].matched_tokens(prompt) == 0

    _run(work())


def test_each_model_of_a_replica_has_events_of_its_own() -> None:
    async def work() -> None:
        replicas = FakeReplica(), FakeReplica()
        for each in replicas:
            each.others["second"] = FakeReplica(b"second root", "second", page=8)
        async with routed(*replicas) as router:
            target, second = router.fleet.replicas[1], replicas[1].others["second"]
            second.store(_IDS)
            await router.until(lambda: len(target.pages.stored) == 2)
            prompt = Prompt(_IDS, roots={1: await target.root_of({}, "second", "")})
            assert target.matched_tokens(prompt) == 16
            assert target.matched_tokens(Prompt(_IDS)) == 0  # the same tokens of the first model
            for _ in range(4):
                assert said((await _ask(router, model="second")).text) == (_WHOLE, True)
            assert (len(replicas[0].bodies), len(replicas[1].bodies)) == (0, 4)

            second.restart(b"second root")  # its engine alone: what the first has stays
            replicas[1].store(_IDS)
            await router.until(lambda: target.pages.stored == set(replicas[1].names))
            second.load = {**second.load, "state": "restarting"}
            await router.until(lambda: not target.takes("second"))
            assert target.takes("fake")
            await _ask(router, model="second")
            assert len(replicas[0].bodies) == 1

            del replicas[1].others["second"]  # the replica came back without it
            await router.until(lambda: target.served("second") == target.served("fake"))
            assert router.idle()

    _run(work())


def test_a_silent_replica_gives_its_requests_up() -> None:
    """It takes a request and hangs: neither tokens nor events come."""

    async def work() -> None:
        replicas = FakeReplica(), FakeReplica()
        async with routed(*replicas, dead_after=1.0) as router:
            replicas[1].store(_IDS)
            await router.until(lambda: len(router.fleet.replicas[1].pages.stored) == 4)
            replicas[1].behaviour = "hang"
            assert said((await _ask(router)).text) == (_WHOLE, True)
            assert len(replicas[1].bodies) == 1
            assert not router.fleet.replicas[1].up
            assert router.idle()

    _run(work())


def test_following_ends_though_an_answer_comes_at_that_moment() -> None:
    """A cancellation that meets the end of a look must not get lost: closing would wait for ever."""

    async def work() -> None:
        async with httpx.AsyncClient() as http:
            fleet = Fleet(RouteConfig(replica=("http://127.0.0.1:1",)), http)
            looks: list[None] = []

            async def look() -> None:
                looks.append(None)
                if len(looks) > 1:
                    await asyncio.Event().wait()
                asyncio.get_running_loop().call_soon(fleet._tasks[0].cancel)  # when this look has just ended

            fleet.replicas[0]._look = look  # type: ignore[method-assign]
            fleet.start()
            await asyncio.wait(fleet._tasks)
            assert fleet._tasks[0].cancelled()

    _run(work())


def test_looking_at_replicas_does_not_change_their_load() -> None:
    async def work() -> None:
        replica = FakeReplica()
        async with routed(replica) as router:
            target = router.fleet.replicas[0]
            ticket = target.open(Prompt(_IDS), 10)
            for _ in range(3):
                replica.restart(b"root")  # another feed: everything is read again
                seen = replica.snapshots
                await router.until(lambda seen=seen: replica.snapshots > seen)
            assert (target.outstanding, target.waiting_tokens) == (1, 16)
            ticket.close()
            assert router.idle()

    _run(work())


def test_a_canary_gets_its_share() -> None:
    async def work() -> None:
        replicas = FakeReplica(), FakeReplica()
        for each in replicas:
            await each.__aenter__()
        config = RouteConfig(
            replica=tuple(each.url for each in replicas), weights=(f"{replicas[1].url}=0.25",), policy="least_loaded"
        )
        async with Router(config) as router:
            await router.all_up()
            chosen = [router.fleet.choose(Prompt((), 1), "fake") for _ in range(2000)]
            share = chosen.count(router.fleet.replicas[1]) / 2000
            assert 0.2 < share < 0.3
            sessions = {router.fleet.choose(Prompt((), 1, session="alice"), "fake") for _ in range(20)}
            assert len(sessions) == 1
        for each in replicas:
            await each.__aexit__()

    _run(work())
