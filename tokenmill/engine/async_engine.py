"""The streaming face: many callers on one asyncio loop, the engine in a thread of its own.

Callers never touch the engine: requests and cancellations cross in a queue that the engine thread empties between
steps, and outputs come back on each caller's asyncio loop. Leaving the `async for` early cancels the request and frees
its pages at the next step boundary. Used by `tokenmill run` and `chat`, and by Python callers.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.engine.adapters.registry import Done
from tokenmill.engine.build import EngineParts, build_engine, one_engine
from tokenmill.engine.collector import RequestCollector
from tokenmill.engine.intake import Prompt
from tokenmill.engine.loop import EngineLoop
from tokenmill.engine.outputs import RequestOutput
from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.types import Request, SamplingParams, TokenEvent

_log = get_logger(__name__)


class EngineDeadError(RuntimeError):
    """A step failed: every request in flight gets this, and no new one is taken."""


@dataclass(slots=True)
class StreamUpdate:
    """One step's news about a request: which sibling, the new text and tokens, and the output so far."""

    index: int
    text: str
    token_ids: list[int]
    output: RequestOutput  # shared and growing: copy what must not change
    finished: bool  # the last update of the request


@dataclass(slots=True, eq=False)
class _Stream:
    collector: RequestCollector
    deliver: Callable[[StreamUpdate | BaseException], None]


class _CallQueue:
    """Calls that other threads have the engine thread make between two turns of its loop."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        self.closed = False

    def post(self, call: Callable[[], None]) -> bool:
        """False: nobody will make the call any more."""
        with self._wake:
            if not self.closed:
                self._calls.append(call)
                self._wake.notify()
            return not self.closed

    def receive(self, timeout: float | None) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._calls or self.closed, timeout)
            calls, self._calls = self._calls, deque()
        for call in calls:
            call()

    def close(self) -> None:
        with self._wake:
            self.closed = True
            self._wake.notify()


class AsyncEngine:
    def __init__(self, model: str | Path = "smollm2", config: EngineConfig | None = None, **options: Any) -> None:
        if config is not None and options:
            raise UserError("both config and options are given", "put the options into the config")
        self.parts: EngineParts = build_engine(model, one_engine(config or EngineConfig.from_options(options)))
        self._streams: dict[str, _Stream] = {}  # engine thread only
        self._changes: set[Done] = set()  # of adapters, that callers wait for; engine thread only
        self._loop = EngineLoop(self.parts.core, self, self.parts.grammars, adapters=self.parts.adapters)
        self._inbox = _CallQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tokenmill-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        chat: bool = False,
        lora: str | None = None,
    ) -> AsyncIterator[StreamUpdate]:
        """Stream a request. `chat`: the prompt is text already rendered by the chat template; `lora`: an adapter."""
        params = params or SamplingParams()
        request = self.parts.intake.request(prompt, params, request_id, priority, chat)
        if lora:
            request.adapter = self.parts.adapters.find(lora)
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[StreamUpdate | BaseException] = asyncio.Queue()

        def deliver(item: StreamUpdate | BaseException) -> None:
            loop.call_soon_threadsafe(news.put_nowait, item)

        text = prompt if isinstance(prompt, str) else None
        collector = RequestCollector(request, text, self.parts.tokenizer)
        stream = _Stream(collector, deliver)
        if not self._inbox.post(lambda: self._begin(request, stream)):
            raise EngineDeadError("the engine has stopped") from self._failure
        try:
            while True:
                item = await news.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.finished:
                    return
        finally:
            self._inbox.post(lambda: self._end(request.request_id, stream))

    async def cancel(self, request_id: str) -> None:
        """Forget a request wherever it is; its stream ends with finish reason "abort"."""
        self._inbox.post(lambda: self._abort(request_id))

    async def load_lora(self, name: str, path: str | Path, replace: bool = False) -> None:
        """Read an adapter beside the steps, and serve it under this name."""
        await self._change(lambda done: self.parts.adapters.load(name, str(path), replace, done))

    async def unload_lora(self, name: str, drain: bool = False) -> None:
        """Forget an adapter; `drain`: when its requests have ended, else one that is in use is refused."""
        await self._change(lambda done: self.parts.adapters.unload(name, drain, done))

    async def _change(self, change: Callable[[Done], None]) -> None:
        """Have the engine thread change its adapters, and wait until that is done."""
        loop, outcome = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def tell(error: UserError | None) -> None:
            if not outcome.done():
                outcome.set_result(error)

        def done(_version: object, error: UserError | None) -> None:
            self._changes.discard(done)
            loop.call_soon_threadsafe(tell, error)

        def call() -> None:
            self._changes.add(done)
            try:
                change(done)
            except UserError as error:
                done(None, error)

        if not self._inbox.post(call):
            raise EngineDeadError("the engine has stopped") from self._failure
        error = await outcome
        if error is not None:
            raise error

    @property
    def alive(self) -> bool:
        return self._failure is None and self._thread.is_alive()

    def close(self) -> None:
        """Finish the current step, drop what is in flight, stop the thread."""
        self._inbox.close()
        self._thread.join()
        self.parts.close()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # --- engine thread ---

    def _run(self) -> None:
        try:
            self._loop.run(self._inbox)
        except BaseException as failure:
            _log.exception("the engine loop failed")
            self._failure = failure
            self._inbox.close()
        self._inbox.receive(0.0)  # those who came last get an answer too
        for done in tuple(self._changes):
            done(None, UserError("the engine has stopped", "make a new one"))
        for stream in self._streams.values():
            error = EngineDeadError("the engine has stopped")
            error.__cause__ = self._failure
            stream.deliver(error)

    def on_events(self, events: list[TokenEvent]) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            text, stop = stream.collector.take(event)
            if stop:
                self._loop.cancel(event.request_id, event.index)
            output = stream.collector.output
            stream.deliver(StreamUpdate(event.index, text, event.token_ids, output, output.finished))

    def on_refused(self, request_id: str, error: UserError) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.deliver(error)

    def _begin(self, request: Request, stream: _Stream) -> None:
        if request.request_id in self._streams:
            stream.deliver(UserError(f"request id '{request.request_id}' is in use", "choose another"))
            return
        self._streams[request.request_id] = stream
        self._loop.submit(request)

    def _end(self, request_id: str, stream: _Stream) -> None:
        """The caller has left. Only its own stream goes: one refused for a duplicate id must not end the other."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._loop.cancel(request_id)

    def _abort(self, request_id: str) -> None:
        self._loop.cancel(request_id)
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        output = stream.collector.output
        for completion in output.outputs:
            completion.finish_reason = completion.finish_reason or "abort"
        stream.deliver(StreamUpdate(0, "", [], output, True))
