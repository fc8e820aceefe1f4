"""One HTTP request's work in the engine: one or more prompts, and their outputs, as deltas or complete.

Text, stop strings and log-probabilities are computed here, in the server process, as events arrive. Knows
neither sockets nor HTTP shapes. The engine client feeds it, routes read it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from tokenmill.engine.collector import RequestCollector
from tokenmill.engine.intake import Intake
from tokenmill.engine.outputs import PositionLogprobs, RequestOutput
from tokenmill.errors import UserError
from tokenmill.serve.tenants.prices import Prices
from tokenmill.timeline import Timeline
from tokenmill.types import Request, TokenEvent


@dataclass(slots=True)
class Delta:
    """What is new of one answer: prompt `number`, sibling `index`."""

    number: int
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class VectorWish:
    """A vector for each prompt. Of pairs `seconds` says where the second texts begin; `score_ids`: logits instead."""

    seconds: Sequence[int] = ()
    score_ids: tuple[int, ...] = ()

    def put_into(self, request: Request, number: int) -> None:
        request.embeds = True
        request.second = self.seconds[number] if self.seconds else 0
        request.score_ids = self.score_ids


@dataclass(slots=True)
class Stages:
    """When the server was done with what precedes the engine, on the monotonic clock."""

    received: float  # the head of the request
    read: float  # body read, template rendered
    tokenized: float
    submitted: float  # grammar checked, admitted


class Member:
    """One prompt of a Generation."""

    def __init__(self, generation: Generation, number: int, request: Request, collector: RequestCollector) -> None:
        self.generation = generation
        self.number = number
        self.request = request
        self.collector = collector
        self.arrived = time.monotonic()
        self.first_token: float | None = None
        self.last_token = 0.0
        self.longest_gap = 0.0  # seconds between two of its tokens
        self.timeline: Timeline | None = None  # of the engine, from the first token on
        self.embedding: list[float] = []
        self.device_seconds = 0.0  # its part of the engine's steps so far, where that is metered
        self.finished = False
        self.resumed_text = ""  # of the tokens that its only answer began with elsewhere
        self.num_resumed = 0  # such tokens

    def resume(self, token_ids: Sequence[int]) -> None:
        """Its answer begins with tokens that the client has already. Raises UserError where that makes no sense."""
        if self.request.params.logprobs is not None and not self.generation.streaming:
            raise UserError("log-probabilities of resume_token_ids are not known here", "leave logprobs out, or stream")
        self.num_resumed, self.resumed_text = len(token_ids), self.collector.replay(list(token_ids))

    @property
    def output(self) -> RequestOutput:
        return self.collector.output

    def take(self, event: TokenEvent) -> bool:
        """Add an event; True if a stop string ended this sequence, which must then be cancelled in the engine."""
        self.device_seconds += event.device_seconds
        self.timeline = event.timeline or self.timeline
        completion = self.output.outputs[event.index]
        if completion.finished:
            return False
        seen = len(completion.logprobs or ())
        self.embedding = event.embedding or self.embedding
        text, stop = self.collector.take(event)
        self.finished = completion.finished and self.output.finished
        generation = self.generation
        if generation.streaming:
            logprobs = completion.logprobs[seen:] if completion.logprobs is not None else []
            generation.post(Delta(self.number, event.index, text, event.token_ids, logprobs, completion.finish_reason))
        if self.finished:
            generation.member_finished()
        return stop


class Generation:
    def __init__(self, streaming: bool, close: Callable[[Generation], None], prices: Prices | None = None) -> None:
        self.streaming = streaming
        self._prices = prices
        self.members: list[Member] = []
        self.num_reasoning_tokens: int | None = None  # None: unknown, or the model does not reason
        self.num_truncated_tokens = 0  # of the prompts, that the request let be cut off
        self.stages = Stages(*[time.monotonic()] * 4)
        self._close = close
        self._deltas: list[Delta] = []
        self._unfinished = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def resume(self, intake: Intake, token_ids: Sequence[int]) -> None:
        """The answer goes on after these tokens, which came from elsewhere."""
        if len(self.members) > 1:
            raise UserError("resume_token_ids goes with one prompt", "send the prompts one by one")
        intake.resume(self.members[0].request, token_ids)
        self.members[0].resume(token_ids)

    def add(self, request: Request, collector: RequestCollector) -> Member:
        member = Member(self, len(self.members), request, collector)
        self.members.append(member)
        self._unfinished += 1
        return member

    # --- the engine client's side ---

    def post(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._wake()

    def member_finished(self) -> None:
        self._unfinished -= 1
        if self._unfinished == 0:
            self._wake()

    def fail(self, error: Exception) -> None:
        if self._error is None and self._unfinished:
            self._error = error
            self._wake()

    # --- the route's side ---

    @property
    def outputs(self) -> list[RequestOutput]:
        return [member.output for member in self.members]

    @property
    def cost(self) -> float | None:
        """Dollars so far; None if nothing has a price."""
        if self._prices is None:
            return None
        prompt = sum(len(output.prompt_token_ids) for output in self.outputs)
        cached = sum(output.num_cached_tokens for output in self.outputs)
        completion = sum(len(each.token_ids) for output in self.outputs for each in output.outputs)
        seconds = sum(member.device_seconds for member in self.members)
        return self._prices.of_time(seconds) + self._prices.of_tokens(prompt, cached, completion)

    @property
    def code(self) -> str | None:
        """The code of the error that ended it, if one did."""
        return getattr(self._error, "code", None)

    @property
    def failed(self) -> bool:
        """Whether an error ended it; a client that left is none."""
        return self._error is not None

    async def first(self, seconds: float | None = None) -> bool:
        """Wait for the first delta, which may be the end; False if these seconds pass before. Raises an early error."""
        try:
            async with asyncio.timeout(seconds):
                await self._wait()
        except TimeoutError:
            return False
        return True

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Batches of new deltas until all sequences have ended. Raises the error that ended them early."""
        while True:
            await self._wait()
            if self._deltas:
                batch, self._deltas = self._deltas, []
                yield batch
            elif self._error is not None:
                raise self._error
            elif self._unfinished == 0:
                return

    async def result(self) -> list[RequestOutput]:
        while self._unfinished:
            await self._wait()
        return self.outputs

    def close(self) -> None:
        """Must be called once the route is done, whatever happened: unfinished sequences are cancelled."""
        if not self._closed:
            self._closed = True
            self._close(self)

    async def _wait(self) -> None:
        if not self._deltas and self._error is None and self._unfinished:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None and not self._deltas:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
