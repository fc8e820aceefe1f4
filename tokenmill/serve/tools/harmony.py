"""GPT-OSS: a call is a message of the harmony format to `functions.NAME`; its body is the arguments as JSON.

The format is described in serve/reasoning/harmony.py. The `analysis` channel is reasoning, which this parser tells
apart itself; all other messages are content. Each call ends the generation, so calls come one by one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import ClassVar

from tokenmill.serve.reasoning.base import Reasoning
from tokenmill.serve.reasoning.harmony import CHANNEL, MESSAGE, START, HarmonyScanner, Piece
from tokenmill.serve.tools.base import CallArguments, CallEnd, ToolEvent, ToolParser
from tokenmill.serve.tools.functions import Function
from tokenmill.serve.tools.json_calls import named_rules, read_arguments

_NAMESPACE = "functions."
_HEADER = f"{CHANNEL}commentary to={_NAMESPACE}"


class Harmony(ToolParser):
    name: ClassVar[str] = "harmony"
    marker: ClassVar[str] = CHANNEL
    reads_reasoning: ClassVar[bool] = True

    def __init__(self, functions: Sequence[Function], certain: bool = False, parallel: bool = True) -> None:
        super().__init__(functions, certain, parallel)
        self._scanner = HarmonyScanner()
        self._body = ""  # of a call that is not complete
        self._index = -1  # of the call whose arguments are passed on

    @classmethod
    def writes(cls, template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    @classmethod
    def grammar(cls, functions: Sequence[Function], parallel: bool) -> str:
        rules = named_rules(functions, _HEADER, f" <|constrain|>json{MESSAGE}", "<|call|>")
        more = f' ("{START}assistant" call)*' if parallel else ""
        return f"calls: call{more}\n{rules}"

    def _step(self, events: list[ToolEvent], final: bool) -> bool:
        pieces = self._scanner.push(self._buffer, final)
        self._buffer = ""
        for piece in pieces:
            name = piece.recipient.removeprefix(_NAMESPACE)
            if name in self._names and (not self._full or self._index >= 0):
                self._take(events, name, piece)
            elif piece.channel == "analysis" and not piece.recipient:
                if piece.text:
                    events.append(Reasoning(piece.text))
            else:
                self._say(events, piece.text)
        return False

    def _take(self, events: list[ToolEvent], name: str, piece: Piece) -> None:
        if self._certain:
            if piece.first:
                self._index = self._start(events, name)
            if piece.text:
                events.append(CallArguments(self._index, piece.text))
            if piece.last:
                events.append(CallEnd(self._index))
                self._index = -1
            return
        self._body += piece.text
        if piece.last:
            body, self._body = self._body, ""
            call = read_arguments(name, body.strip() or json.dumps({}))
            if call is None:
                self._say(events, body)
            else:
                self._call(events, *call)
