"""The harmony format of GPT-OSS, split into messages as it comes.

    <|channel|>analysis<|message|>REASONING<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{ARGUMENTS}<|call|>
    <|start|>assistant<|channel|>final<|message|>ANSWER<|return|>

The prompt ends with `<|start|>assistant`, so an answer begins with the header of a message. The recipient is written
in the role's or the channel's part of the header. `commentary` without a recipient is a preamble for the user.
`<|call|>` and `<|return|>` end the generation and are usually not part of the text. Text outside of any message is read
as a message without a channel. Used by the reasoning parser and by the tool-call parser of this format.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenmill.serve.reasoning.scan import earliest, may_begin, overlap

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARKERS = (START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS)
_MAX_HEADER = 512  # characters
_HEADER_STARTS = (CHANNEL, START, " to=", "assistant<|", "assistant to=")
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a message. `first`: it begins the message; `last`: it ends it (the text may then be empty)."""

    channel: str
    recipient: str
    text: str
    first: bool
    last: bool


class HarmonyScanner:
    def __init__(self) -> None:
        self._buffer = ""
        self._in_body = False
        self._begun = False
        self._first = True
        self._channel = ""
        self._recipient = ""

    def push(self, text: str, final: bool = False) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while self._body(pieces, final) if self._in_body else self._header(final):
            pass
        if final and self._in_body:
            self._add(pieces, "", True)
            self._in_body = False
        return pieces

    def _header(self, final: bool) -> bool:
        body = self._buffer.lstrip("\r\n")
        if not body or (may_begin(body, _HEADER_STARTS) and not final):
            if final:
                blank = not self._buffer.strip() and self._begun  # between messages
                return self._open("", "", self._buffer) if self._buffer and not blank else False
            return False
        if not body.startswith(_HEADER_STARTS):
            return self._open("", "", self._buffer)
        end = body.find(MESSAGE, 0, _MAX_HEADER)
        if end < 0:
            if len(body) >= _MAX_HEADER or final:
                return self._open("", "", self._buffer)  # no header after all
            return False
        header = body[:end]
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        return self._open(channel[1] if channel else "", recipient[1] if recipient else "", body[end + len(MESSAGE) :])

    def _open(self, channel: str, recipient: str, rest: str) -> bool:
        self._channel, self._recipient, self._buffer = channel, recipient, rest
        self._in_body = self._first = self._begun = True
        return True

    def _body(self, pieces: list[Piece], final: bool) -> bool:
        plain = not self._channel and not self._recipient  # broken framing: a header may follow, but is not required
        stops = (*ENDS, START) if not plain else ENDS
        found = earliest(self._buffer, stops)
        if found is None:
            certain = len(self._buffer) - (0 if final else overlap(self._buffer, stops))
            text, self._buffer = self._buffer[:certain], self._buffer[certain:]
            if text:
                self._add(pieces, text, False)
            return False
        index, marker = found
        self._add(pieces, self._buffer[:index], True)
        self._buffer = self._buffer[index + (len(marker) if marker in ENDS else 0) :]
        self._in_body = False
        return True

    def _add(self, pieces: list[Piece], text: str, last: bool) -> None:
        pieces.append(Piece(self._channel, self._recipient, text, self._first, last))
        self._first = False
