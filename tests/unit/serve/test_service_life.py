"""What a request leaves behind in the server when it has ended: nothing. And its deadline, with a hung engine."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from tokenmill.checkpoint.number_tokenizer import numbering_tokenizer
from tokenmill.engine.messages import Heartbeat, Ready
from tokenmill.serve.callers import Caller
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.errors import ApiError
from tokenmill.serve.generation import Generation
from tokenmill.serve.service import Service
from tokenmill.serve.supervision.adapter_questions import AdapterQuestions
from tokenmill.serve.tenants.keys import Client
from tokenmill.serve.workers.jobs import Setup
from tokenmill.serve.workers.pool import WorkerPool
from tokenmill.types import SamplingParams, TokenEvent

_OPTIONS = {"context": 64, "concurrency": 4, "kv_budget_policy": "", "kv_budget": 0, "seed": 0}
_ELEVEN_DAYS = 1e6


class Engine:
    """Takes requests and answers nobody, but for what a test posts."""

    def __init__(self) -> None:
        self.observers: list[Any] = []
        self.withdrawn: list[str] = []
        self.adapters = AdapterQuestions(lambda _question: None)
        self.heartbeat = Heartbeat()

    def observe(self, observer: Any) -> None:
        self.observers.append(observer)

    def submit(self, generation: Generation) -> None: ...

    def withdraw(self, generation: Generation) -> None:
        self.withdrawn += [member.request.request_id for member in generation.members]

    def answer(self, generation: Generation, finish_reason: str | None) -> None:
        for member in generation.members:
            member.take(TokenEvent(member.request.request_id, token_ids=[5], finish_reason=finish_reason))
            for observer in self.observers:
                observer.on_tokens(member, 1)


def make_service() -> tuple[Service, Engine]:
    engine = Engine()
    identity = Ready(100, [0], _OPTIONS, "none", "none", "none", 0, 0.0)
    workers = WorkerPool(Setup("", 0), 0, 0)  # texts are short: none is asked
    service = Service(ServeConfig(), ("m",), engine, identity, numbering_tokenizer(100), None, workers)  # type: ignore[arg-type]
    return service, engine


async def opened(service: Service, deadline: float | None, num_prompts: int = 1) -> Generation:
    prompts = [[1, 2, 3]] * num_prompts
    caller = Caller(Client(), deadline=deadline)
    return await service.open(prompts, lambda _: SamplingParams(max_tokens=4), caller, streaming=False)


def loops() -> list[Any]:
    import uvloop

    return [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.mark.parametrize("make_loop", loops(), ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("ending", ["answer", "leave", "fail"])
def test_nothing_of_a_finished_request_stays_until_its_deadline(make_loop: Any, ending: str) -> None:
    async def scenario() -> None:
        service, engine = make_service()

        async def request() -> list[weakref.ref[Any]]:
            generation = await opened(service, _ELEVEN_DAYS)
            kept = [weakref.ref(generation), weakref.ref(generation.members[0])]
            if ending == "answer":
                engine.answer(generation, "length")
                await generation.result()
            elif ending == "fail":
                generation.fail(ApiError(503, "the engine is gone"))
                with pytest.raises(ApiError):
                    await generation.result()
            generation.close()
            return kept

        kept = await request()
        gc.collect()
        assert [ref() for ref in kept] == [None, None]
        assert len(engine.withdrawn) == 1
        assert service.admission.num_active == service.admission.num_waiting == 0

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(scenario())


def test_a_hung_engine_is_no_excuse_for_a_missed_deadline() -> None:
    async def scenario() -> None:
        service, engine = make_service()
        for num_prompts in (1, 2):
            generation = await opened(service, 0.01, num_prompts)
            with pytest.raises(ApiError) as caught:
                await generation.result()
            assert (caught.value.status, caught.value.code) == (429, "deadline")
            generation.close()
        assert len(engine.withdrawn) == 3  # so the engine computes none of them, once it goes on
        assert service.metrics.get("admission_rejections") == 2

    asyncio.run(scenario())


def test_a_first_token_ends_the_deadline() -> None:
    async def scenario() -> None:
        service, engine = make_service()
        generation = await opened(service, 30.0)
        deadline = generation.members[0].request.deadline
        assert deadline is not None
        assert service._timers
        engine.answer(generation, None)
        assert not service._timers
        engine.answer(generation, "length")
        assert await generation.result()
        generation.close()
        several = await opened(service, 30.0, num_prompts=2)
        assert [member.request.deadline for member in several.members] == [None, None]  # one in time is enough
        several.close()

    asyncio.run(scenario())
