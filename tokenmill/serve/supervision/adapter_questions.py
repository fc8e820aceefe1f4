"""What the server asks the engine about adapters, and which ones there are: the engine reads files, this side knows.

An answer counts also where nobody waits for it any more: the engine has changed. A new engine gets the adapters of the
last one again. Owned by the engine client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from tokenmill.config import EngineConfig
from tokenmill.engine.messages import AdapterAnswer, AdapterInfo, LoadAdapter, Ready, UnloadAdapter
from tokenmill.serve.errors import ApiError

Question = LoadAdapter | UnloadAdapter


class AdapterQuestions:
    def __init__(self, send: Callable[[Question], None]) -> None:
        """`send` raises ApiError if there is no engine to ask."""
        self._send = send
        self._open: dict[int, tuple[Question, asyncio.Future[AdapterAnswer]]] = {}
        self._number = 0
        self.by_name: dict[str, AdapterInfo] = {}

    async def load(self, name: str, path: str, replaces: bool) -> AdapterAnswer:
        """Have the engine read an adapter; the answer comes when requests can name it."""
        return await self._ask(LoadAdapter(self._next(), name, path, replaces))

    async def unload(self, name: str, drains: bool) -> AdapterAnswer:
        """Have the engine forget an adapter; the answer comes when its memory is free."""
        answer = self._ask(UnloadAdapter(self._next(), name, drains))
        if drains:
            self.by_name.pop(name, None)  # no new requests
        return await answer

    def take(self, answer: AdapterAnswer) -> None:
        question, waiting = self._open.pop(answer.number)
        if answer.adapter is not None:
            self.by_name[answer.adapter.name] = answer.adapter
        elif isinstance(question, UnloadAdapter) and not question.drains and not answer.error:
            self.by_name.pop(question.name, None)
        if not waiting.done():
            waiting.set_result(answer)

    def fail(self, error: ApiError) -> None:
        """The engine is gone."""
        for _question, waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(error)
        self._open.clear()

    def paths(self) -> dict[str, str]:
        return {adapter.name: adapter.path for adapter in self.by_name.values()}

    def enter(self, identity: Ready) -> None:
        """What a new engine has."""
        self.by_name = {adapter.name: adapter for adapter in identity.adapters}

    def _ask(self, question: Question) -> asyncio.Future[AdapterAnswer]:
        self._send(question)
        answer: asyncio.Future[AdapterAnswer] = asyncio.get_running_loop().create_future()
        self._open[question.number] = question, answer
        return answer

    def _next(self) -> int:
        self._number += 1
        return self._number


def replacement_config(config: EngineConfig, last: Ready | None) -> EngineConfig:
    """Of an engine that replaces the `last` one: adapters come by name, so that one whose files are gone does not keep
    it from starting; the memory for them stays what it was."""
    if last is None or not config.serves_adapters:
        return config
    return replace(config, lora=(), enable_lora=True, max_lora_rank=last.options["max_lora_rank"])
