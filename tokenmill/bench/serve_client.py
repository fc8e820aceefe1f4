"""A lean HTTP client for streamed answers: one asyncio protocol on httptools, so that measuring costs little CPU.

Connections are kept and used again. What comes back is a Sample: times of every piece, token counts, or the error.
Knows the OpenAI stream format, not what is measured with it.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools
import msgspec

from tokenmill.errors import UserError

_IDLE_SECONDS = 2.0  # servers close idle connections after 5 s or more; do not race with that
_ERROR_BYTES = 500


@dataclass(slots=True)
class Sample:
    """One request as the client saw it. Times are of one clock, in seconds."""

    intended: float  # when the schedule wanted it sent
    sent: float
    prompt_len: int
    ended: float = 0.0
    stamps: array[float] = field(default_factory=lambda: array("d"))  # arrival of each piece with content
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    pieces: list[str] = field(default_factory=list)  # filled if texts are kept

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def first(self) -> float:
        """When the first piece came; the end, for an answer without any."""
        return self.stamps[0] if self.stamps else self.ended


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"null")


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def content(self) -> str:
        if self.delta is None:
            return self.text or ""
        delta = self.delta
        calls = "" if bytes(delta.tool_calls) in (b"null", b"[]") else " "
        return delta.content or delta.reasoning_content or delta.reasoning or calls


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


_decode = msgspec.json.Decoder(_Chunk).decode


class EventReader:
    """Turns the bytes of an event stream into a Sample's numbers."""

    def __init__(self, sample: Sample, keep_text: bool) -> None:
        self._sample = sample
        self._keep_text = keep_text
        self._rest = b""
        self._first_choice = 0.0
        self._counted = False
        self._complete = False

    def feed(self, data: bytes, now: float) -> None:
        lines = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def close(self, now: float) -> None:
        """The stream is over. Without [DONE] or a finish reason it was cut off."""
        sample = self._sample
        sample.ended = now
        if not self._complete and not sample.error:
            sample.error = "the stream ended before the answer did"
        if not sample.stamps and self._first_choice and sample.ok:
            sample.stamps.append(self._first_choice)  # an answer without text still has a first moment
        if not self._counted:
            sample.output_tokens = len(sample.stamps)

    def _event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self._complete = True
            return
        try:
            chunk = _decode(payload)
        except msgspec.MsgspecError as error:
            self._sample.error = f"an event is not of the OpenAI format: {error}"
            return
        if chunk.usage is not None:
            self._count(chunk.usage)
        if bytes(chunk.error) != b"null":
            self._sample.error = bytes(chunk.error)[:_ERROR_BYTES].decode("utf-8", "replace")
        for choice in chunk.choices:
            self._first_choice = self._first_choice or now
            content = choice.content()
            if content:
                self._sample.stamps.append(now)
                if self._keep_text:
                    self._sample.pieces.append(content)
            if choice.finish_reason:
                self._complete = True

    def _count(self, usage: _Usage) -> None:
        if usage.completion_tokens:
            self._counted = True
            self._sample.output_tokens = usage.completion_tokens
        self._sample.prompt_len = usage.prompt_tokens or self._sample.prompt_len
        if usage.prompt_tokens_details is not None:
            self._sample.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0


class _Connection(asyncio.Protocol):
    """One request at a time. httptools calls the on_* methods."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._done: asyncio.Future[None] | None = None
        self._reader: EventReader | None = None
        self._sample: Sample | None = None
        self._status = 0
        self._refusal = b""
        self._now = 0.0
        self.used = 0.0
        self.open = True
        self.answered = False  # a byte of the current answer has come

    async def exchange(self, data: bytes, sample: Sample, keep_text: bool) -> None:
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._reader, self._sample = EventReader(sample, keep_text), sample
        self._status, self._refusal, self.answered = 0, b"", False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        await self._done

    def close(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.close()

    # --- asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self.answered = True
        if self._parser is None:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"the answer is not HTTP: {error}")
            self.close()

    def connection_lost(self, exception: Exception | None) -> None:
        self.open = False
        self._now = time.perf_counter()
        self._end(f"the connection was lost{f': {exception}' if exception else ''}")

    # --- httptools ---

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._status == 200:
            assert self._reader is not None
            self._reader.feed(body, self._now)
        elif len(self._refusal) < _ERROR_BYTES:
            self._refusal += body

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if not self._parser.should_keep_alive():
            self.close()
        text = self._refusal[:_ERROR_BYTES].decode("utf-8", "replace")
        self._end("" if self._status == 200 else f"HTTP {self._status}: {text}")

    def _end(self, error: str) -> None:
        if self._done is None or self._done.done():
            return
        assert self._reader is not None
        assert self._sample is not None
        self._sample.error = self._sample.error or error
        self._reader.close(self._now)
        self.used = self._now
        self._parser = None
        self._done.set_result(None)


class StreamClient:
    """Sends bodies to one endpoint."""

    def __init__(self, base_url: str, path: str, headers: Mapping[str, str], timeout: float, keep_text: bool) -> None:
        parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"'{base_url}' is not a base URL", "write http://127.0.0.1:8000")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._timeout = timeout
        self._keep_text = keep_text
        self._idle: list[_Connection] = []
        lines = {"host": parts.netloc.rpartition("@")[2], "content-type": "application/json", **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._head = f"POST {parts.path.rstrip('/')}{path} HTTP/1.1\r\n{head}content-length: ".encode()

    async def send(
        self, body: bytes, prompt_len: int, intended: float | None = None, timeout: float | None = None
    ) -> Sample:
        """Never raises for what the server does: that is in the sample's error. No `intended` time means now."""
        now = time.perf_counter()
        timeout = self._timeout if timeout is None else timeout
        sample = Sample(now if intended is None else intended, now, prompt_len)
        data = self._head + str(len(body)).encode() + b"\r\n\r\n" + body
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(timeout):
                connection = await self._connect()
                used = bool(connection.used)
                await connection.exchange(data, sample, self._keep_text)
                if used and not connection.open and not connection.answered:
                    # The server closed a kept connection while the request was on its way: nobody has read it.
                    sample.error, sample.ended = "", 0.0
                    connection = await self._connect(new=True)
                    await connection.exchange(data, sample, self._keep_text)
        except TimeoutError:
            sample.error = f"no complete answer within {timeout:.6g} s"
        except OSError as error:
            sample.error = f"cannot connect: {error}"
        if connection is not None:
            if sample.ok and connection.open:
                self._idle.append(connection)
            else:
                connection.close()
        sample.ended = sample.ended or time.perf_counter()
        return sample

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connect(self, new: bool = False) -> _Connection:
        now = time.perf_counter()
        while self._idle and not new:
            connection = self._idle.pop()
            if connection.open and now - connection.used < _IDLE_SECONDS:
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        return made
