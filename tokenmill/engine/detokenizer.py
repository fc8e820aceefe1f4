"""Token ids to text as they come, and stop strings in that text.

Whatever the tokens are cut into, the deltas joined are the text of the whole output: half a UTF-8 character waits for
its other half, and so does the beginning of a stop string. Never looks back, so a token costs the same after ten or ten
thousand others. Imports no torch and knows nothing about requests. Called by the collector.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenmill.types import SamplingParams


class TokenText(Protocol):
    """What is needed of a tokenizer here."""

    special_ids: frozenset[int]
    adds_leading_space: bool

    def token_bytes(self, token_id: int) -> bytes: ...


class IncrementalDetokenizer:
    """One output sequence.

    Its text is what the output adds to the text of the prompt. So the space with which SentencePiece starts a text is
    dropped only where the output is the start: after a prompt without any text of its own.
    """

    def __init__(self, tokenizer: TokenText, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden_ids = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drop_space = tokenizer.adds_leading_space and not any(map(self._bytes, prompt_ids))
        self._stops = [_StopString(text) for text in dict.fromkeys(params.stop)]
        self._include_stop = params.include_stop_str_in_output
        self._held = ""  # decoded, but perhaps the beginning of a stop string
        self._parts: list[str] = []
        self._finished = False
        self.stop_reason: str | None = None  # the stop string that was found

    @property
    def text(self) -> str:
        """Everything returned so far."""
        return "".join(self._parts)

    def push(self, token_ids: Sequence[int], finished: bool) -> str:
        """Take the next tokens; returns the text that is now certain. Nothing comes after a stop string or the end."""
        if self._finished:
            return ""
        data = b"".join(map(self._bytes, token_ids))
        if self._drop_space and data:
            data = data.removeprefix(b" ")
            self._drop_space = False
        text = self._decoder.decode(data, final=finished)
        delta = self._until_stop(text) if self._stops else text
        if finished and self.stop_reason is None:
            delta, self._held = delta + self._held, ""
        self._finished = finished or self.stop_reason is not None
        if delta:
            self._parts.append(delta)
        return delta

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._hidden_ids else self._tokenizer.token_bytes(token_id)

    def _until_stop(self, text: str) -> str:
        """The stop string that is complete first ends the text; of two complete at once, the longer."""
        pending = self._held + text
        for place, character in enumerate(text, start=len(self._held) + 1):
            found = [stop for stop in self._stops if stop.advance(character)]
            if found:
                longest = max(found, key=lambda stop: len(stop.text))
                self.stop_reason, self._held = longest.text, ""
                return pending[: place if self._include_stop else place - len(longest.text)]
        certain = len(pending) - max(stop.matched for stop in self._stops)
        self._held = pending[certain:]
        return pending[:certain]


class _StopString:
    """Follows a stop string through a stream of characters (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # length of the longest beginning of `text` that ends the stream so far
        self._fallback = [0] * len(text)  # by matched length - 1: the next shorter candidate
        length = 0
        for place in range(1, len(text)):
            while length and text[place] != text[length]:
                length = self._fallback[length - 1]
            length += text[place] == text[length]
            self._fallback[place] = length

    def advance(self, character: str) -> bool:
        """Take one character; True when the whole string has just appeared."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        self.matched += self.text[self.matched] == character
        return self.matched == len(self.text)
