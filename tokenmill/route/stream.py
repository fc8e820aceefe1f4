"""One streamed answer of completions or chat, as the router passes it on: what the client has, and what it lacks.

Chunks are held until the one that brings their token ids, which tells that all these tokens say is there; then they
leave together. So the client never has half of what a token says, and a stream that breaks can go on elsewhere after
the tokens it has (`output_ids`). Pure: bytes in, bytes out.
"""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
_EMPTY: tuple[dict[str, Any], ...] = ({}, {"content": ""})
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class BrokenStreamError(Exception):
    """The replica ended a stream that another can go on with."""


class AnswerStream:
    def __init__(self, wants_ids: bool, wants_usage: bool) -> None:
        """What the caller asked for; the replica is always asked for token ids."""
        self._wants_ids = wants_ids
        self._wants_usage = wants_usage
        self._head: dict[str, Any] = {}  # id, created and model of the first chunk: the same for all
        self._held: list[dict[str, Any]] = []
        self._buffer = b""
        self._num_prompt_tokens = 0
        self._told_usage = False
        self.output_ids: list[int] = []
        self.resumable = True  # until a chunk comes without token ids
        self.finished = False  # it has its finish reason
        self.done = False  # and its end

    def begin_leg(self) -> None:
        """Another replica goes on: what the last one left unfinished is gone."""
        self._buffer, self._held = b"", []

    def feed(self, data: bytes) -> bytes:
        """What can be passed on now. Raises BrokenStreamError where the replica says that its engine is gone."""
        self._buffer += data
        *events, self._buffer = self._buffer.split(b"\n\n")
        return b"".join(map(self._take, events))

    def end(self) -> bytes:
        """Of a stream that broke after its finish reason: nothing is missing but the end."""
        self.done = True
        usage = b""
        if self._wants_usage and not self._told_usage:
            prompt, output = self._num_prompt_tokens, len(self.output_ids)
            counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
            usage = _event({**self._head, "choices": [], "usage": counts})
        return usage + DONE

    def _take(self, event: bytes) -> bytes:
        if not event.startswith(b"data: "):
            return event + b"\n\n" if not self.output_ids else b""  # a ping, before the first token
        if event == DONE[:-2]:
            self.done = True
            return DONE
        chunk = _decode(event[6:])
        if "error" in chunk and not chunk.get("choices"):
            return self._take_error(chunk)
        self._head = self._head or {name: chunk[name] for name in ("id", "object", "created", "model") if name in chunk}
        chunk.update(self._head)
        if not chunk.get("choices"):
            self._told_usage = self._told_usage or bool(chunk.get("usage"))
            return _event(chunk)
        return self._take_choice(chunk, chunk["choices"][0])

    def _take_error(self, chunk: dict[str, Any]) -> bytes:
        error = chunk["error"]
        if isinstance(error, dict) and error.get("code") in ("engine_unavailable", "draining"):
            raise BrokenStreamError(str(error.get("message"))[:200])
        return _event(chunk)

    def _take_choice(self, chunk: dict[str, Any], choice: dict[str, Any]) -> bytes:
        ids = choice.get("token_ids")
        prompt = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if prompt:
            self._num_prompt_tokens = len(prompt)
        self._held.append(chunk)
        if ids is None and not _opens(choice):
            self.resumable = False
        ends = choice.get("finish_reason") is not None
        if not ids and not ends and self.resumable:
            return b""
        self.output_ids += ids or ()
        self.finished = self.finished or ends
        held, self._held = self._held, []
        return b"".join(map(self._shown, held))

    def _shown(self, chunk: dict[str, Any]) -> bytes:
        choice = chunk["choices"][0]
        if not self._wants_ids:
            chunk.pop("prompt_token_ids", None)
            choice.pop("prompt_token_ids", None)
            ids = choice.pop("token_ids", None)
            says = choice.get("text") or choice.get("logprobs") or choice.get("finish_reason")
            if ids is not None and not says and choice.get("delta", {}) in _EMPTY:
                return b""  # it said nothing but its token ids
        return _event(chunk)


def _opens(choice: dict[str, Any]) -> bool:
    """The first chunk of a chat answer: it belongs to no token."""
    return "role" in (choice.get("delta") or {})


def _event(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"
