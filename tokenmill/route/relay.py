"""Takes one request to a replica and its answer back; to another replica if the first cannot, or dies on the way.

Before the first token a request is simply sent again. After it, a stream of completions or chat is resumed: the same
body with the token ids that the caller has (`resume_token_ids`) and the same seed, so that the same tokens follow. A
stream that brings no token for `resume_timeout` seconds goes on elsewhere too, though its replica lives; one that does
so twice in a row ends. The load of a replica is held by the ticket of each leg, whatever happens to it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from tokenmill.log import get_logger
from tokenmill.route.answer import EVENT_STREAM, CallerAnswer
from tokenmill.route.config import RouteConfig
from tokenmill.route.fleet import Fleet
from tokenmill.route.metrics import RouterMetrics
from tokenmill.route.patience import Patience, StalledError
from tokenmill.route.prompt import Prompt
from tokenmill.route.replica import Replica
from tokenmill.route.stream import AnswerStream, BrokenStreamError
from tokenmill.route.target import Ticket
from tokenmill.route.texts import CHAT, COMPLETIONS
from tokenmill.serve.errors import ApiError

_log = get_logger(__name__)
_AWAY = (502, 503, 504)
_FULL = ("queue_full", "text_queue_full")
_STREAMS = (EVENT_STREAM, "application/x-ndjson")
_UPSTREAM_PATHS = (COMPLETIONS, CHAT, "/v1/embeddings", "/v1/responses")
_STALLED = "stalled"
_PAUSE = 0.05  # seconds between tries of a stream that nobody can go on with just now


@dataclass(eq=False)
class Call:
    """One request of a caller."""

    method: str
    path: str
    target: str  # path and query as they came
    headers: dict[str, str]  # for the replica
    body: bytes
    prompt: Prompt
    value: dict[str, Any] | None = None  # the body, if it is a JSON object
    model: str | None = None
    max_tokens: int = 0
    stream: AnswerStream | None = field(init=False, default=None)  # only of what can be resumed

    @property
    def begun(self) -> bool:
        """Whether the caller has tokens that another replica can go on after."""
        return self.stream is not None and bool(self.stream.output_ids)

    def __post_init__(self) -> None:
        value = self.value
        if value is None or not _can_resume(self.path, value):
            return
        options = value.get("stream_options")
        wants_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        self.stream = AnswerStream(bool(value.get("return_token_ids")), wants_usage)
        if value.get("seed") is None:  # the same for all replicas that it comes to
            self.value = {**value, "seed": secrets.randbits(62)}

    def content(self) -> bytes:
        if self.stream is None or self.value is None:
            return self.body
        extra: dict[str, Any] = {"return_token_ids": True}
        if self.stream.output_ids:
            extra["resume_token_ids"] = self.stream.output_ids
        return msgspec.json.encode({**self.value, **extra})


@dataclass(frozen=True)
class Failure:
    """A leg that did not bring the answer. `status`: what the replica refused it with."""

    reason: str
    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""


class Relay:
    def __init__(self, fleet: Fleet, http: httpx.AsyncClient, metrics: RouterMetrics, config: RouteConfig) -> None:
        self._fleet = fleet
        self._http = http
        self._metrics = metrics
        self._config = config

    async def run(self, call: Call, answer: CallerAnswer) -> None:
        tried: list[Replica] = []
        last: Failure | None = None
        deadline, num_tokens = 0.0, 0  # of a stream that waits for somebody to go on with it; what it had then
        while True:
            replica = self._fleet.choose(call.prompt, call.model, tried)
            if replica is None:
                deadline = deadline or time.monotonic() + self._config.resume_timeout
                if call.begun and await self._somebody(call, deadline):
                    tried.clear()
                    continue
                await self._give_up(call, answer, last, call.begun)
                return
            failure = await self._leg(call, replica, answer)
            if failure is None:
                return
            tried.append(replica)
            last = failure if failure.status or last is None else last
            if call.stream is not None and call.stream.finished:  # only its end is missing, if that
                await answer.write(b"" if call.stream.done else call.stream.end())
                await answer.finish()
                return
            if call.stream is not None and not call.stream.resumable:
                await self._give_up(call, answer, last, begun=True)
                return
            if call.stream is not None and call.begun:
                if len(call.stream.output_ids) > num_tokens:
                    deadline, num_tokens = 0.0, len(call.stream.output_ids)
                elif failure.reason == _STALLED:  # it has waited long enough
                    await self._give_up(call, answer, last, begun=True)
                    return
            elif answer.started and call.stream is None:
                await answer.fail(ApiError(502, "the replica's answer broke off", code="replica_lost"))
                return
            else:
                self._metrics.retries.labels(failure.reason).inc()

    async def _somebody(self, call: Call, deadline: float) -> bool:
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_PAUSE)
        return await self._fleet.wait_usable(call.model, deadline)

    async def _give_up(self, call: Call, answer: CallerAnswer, last: Failure | None, begun: bool) -> None:
        if begun:
            self._metrics.broken.inc()
            message = "the replica's answer broke off, and no other can go on with it"
            await answer.fail(ApiError(503, message, code="replica_lost", retry_after=2))
        elif self._config.upstream and call.method == "POST" and call.path in _UPSTREAM_PATHS:
            await self._overflow(call, answer)
        elif last is not None and last.status and not answer.started:
            await answer.whole(last.status, last.headers, last.body)
        else:
            await answer.fail(ApiError(503, "no replica takes requests now", code="no_replica", retry_after=2))

    async def _leg(self, call: Call, replica: Replica, answer: CallerAnswer) -> Failure | None:
        """One try; None if the caller has its answer."""
        self._metrics.requests.labels(replica.url).inc()
        ticket, failed = replica.open(call.prompt, call.max_tokens), True
        self._metrics.matched_tokens.inc(min(ticket.matched, call.prompt.num_tokens) if call.prompt.token_ids else 0)
        scope = asyncio.timeout(None)  # the replica ends it when it is dead
        patience = Patience(self._config.resume_timeout, call.begun)
        try:
            async with scope:
                replica.legs.add(scope)
                url = f"{replica.url}{call.target}"
                request = self._http.build_request(call.method, url, headers=call.headers, content=call.content())
                async with patience.waiting():
                    response = await self._http.send(request, stream=True)
                try:
                    failure = await self._pass_on(call, replica, response, ticket, answer, patience)
                finally:
                    await response.aclose()
            failed = failure is not None
            return failure
        except httpx.ConnectError:
            replica.on_unreachable()
            return Failure("unreachable")
        except StalledError:
            _log.warning("%s sends no more tokens of a stream, though it lives", replica.url)
            return Failure(_STALLED)
        except TimeoutError:
            return Failure("dead")
        except BrokenStreamError as error:
            _log.warning("%s ended a stream: %s", replica.url, error)
            return Failure("engine gone")
        except httpx.HTTPError:
            return Failure("cut")
        finally:
            replica.legs.discard(scope)
            ticket.close(failed)

    async def _pass_on(
        self,
        call: Call,
        replica: Replica,
        response: httpx.Response,
        ticket: Ticket,
        answer: CallerAnswer,
        patience: Patience,
    ) -> Failure | None:
        status, headers, begun = response.status_code, [*response.headers.multi_items()], call.begun
        if status in _AWAY or status == 429 or (status != 200 and begun):
            body = await response.aread()
            full = status == 429 and _code(body) in _FULL
            if full:
                self._fleet.set_full(replica)
            if full or begun or status in _AWAY:
                return Failure("full" if full else "refused", status, headers, body)
            await answer.whole(status, headers, body)
            return None
        if not response.headers.get("content-type", "").startswith(_STREAMS):
            body = await response.aread()
            ticket.started()
            await answer.whole(status, headers, body)
            return None
        if call.stream is None:
            async for data in response.aiter_raw():
                ticket.started()
                await answer.start(status, headers)
                await answer.write(data)
            await answer.start(status, headers)
            await answer.finish()
            return None
        return await self._pass_stream(call.stream, response, ticket, answer, patience)

    async def _pass_stream(
        self,
        stream: AnswerStream,
        response: httpx.Response,
        ticket: Ticket,
        answer: CallerAnswer,
        patience: Patience,
    ) -> Failure | None:
        stream.begin_leg()
        if stream.output_ids:
            self._metrics.resumed.inc()
        try:
            coming, num_tokens = response.aiter_raw(), len(stream.output_ids)
            while True:
                async with patience.waiting():
                    data = await anext(coming, None)
                if data is None:
                    break
                shown = stream.feed(data)
                if len(stream.output_ids) > num_tokens:
                    num_tokens = len(stream.output_ids)
                    ticket.started()
                    patience.renew()
                if shown:
                    await answer.start(response.status_code, response.headers.multi_items())
                    await answer.write(shown)
        except httpx.HTTPError:
            if not stream.done:  # else nothing is missing
                raise
        if not stream.done:
            return Failure("cut")  # it ended in good order, but too early
        await answer.start(response.status_code, response.headers.multi_items())
        await answer.finish()
        return None

    async def _overflow(self, call: Call, answer: CallerAnswer) -> None:
        """To the upstream, without anything of the caller's but the body."""
        self._metrics.overflowed.inc()
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if self._config.upstream_key:
            headers["authorization"] = f"Bearer {self._config.upstream_key}"
        body = call.body
        if self._config.upstream_model and call.value is not None:
            own = msgspec.json.decode(body)
            body = msgspec.json.encode({**own, "model": self._config.upstream_model})
        url = f"{self._config.upstream}{call.target}"
        try:
            async with self._http.stream("POST", url, headers=headers, content=body) as response:
                await answer.start(response.status_code, response.headers.multi_items())
                async for data in response.aiter_raw():
                    await answer.write(data)
                await answer.finish()
        except httpx.HTTPError as error:
            _log.warning("the upstream failed: %s", error)
            await answer.fail(ApiError(502, "the upstream failed", code="upstream_failed"))


def _can_resume(path: str, value: dict[str, Any]) -> bool:
    """One streamed answer to one prompt."""
    prompt = value.get("prompt")
    several = isinstance(prompt, list) and len(prompt) != 1 and not all(type(each) is int for each in prompt[:1])
    alone = value.get("n") in (None, 1) and value.get("best_of") in (None, 1) and not several
    return path in (COMPLETIONS, CHAT) and value.get("stream") is True and alone and "resume_token_ids" not in value


def _code(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["code"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return ""
