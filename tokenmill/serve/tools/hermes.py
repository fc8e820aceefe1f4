"""Hermes, Qwen 2.5, Qwen3 and Granite 4: `<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`.

Calls may stand anywhere in the text, in any number, each between tags of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tokenmill.serve.reasoning.scan import overlap
from tokenmill.serve.tools.base import ToolEvent
from tokenmill.serve.tools.functions import Function
from tokenmill.serve.tools.json_calls import JsonCallParser, object_rules

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


class Hermes(JsonCallParser):
    name: ClassVar[str] = "hermes"
    marker: ClassVar[str] = _OPEN

    @classmethod
    def writes(cls, template: str) -> bool:
        return _OPEN in template

    @classmethod
    def grammar(cls, functions: Sequence[Function], parallel: bool) -> str:
        calls = 'calls: call ("\\n" call)*\n' if parallel else "calls: call\n"
        return calls + object_rules(functions, "arguments", f"{_OPEN}\n", f"\n{_CLOSE}")

    def _seek(self, events: list[ToolEvent], final: bool) -> bool:
        if self._full:
            return self._rest(events, final)
        start = self._buffer.find(_OPEN)
        if start >= 0:
            self._say(events, self._buffer[:start])
            self._buffer = self._buffer[start:]
            self._state = self._opened
            return True
        held = 0 if final else overlap(self._buffer, (_OPEN,))
        certain = len(self._buffer) - held
        self._say(events, self._buffer[:certain])
        self._buffer = self._buffer[certain:]
        return False

    def _opened(self, events: list[ToolEvent], final: bool) -> bool:
        body = self._buffer[len(_OPEN) :].lstrip()
        if body.startswith("{"):
            return self._begin_object(len(self._buffer) - len(body))
        if not body and not final:
            return False
        self._say(events, _OPEN)  # no object follows: it was only text
        self._buffer = self._buffer[len(_OPEN) :]
        self._state = self._seek
        return True

    def _close(self, _events: list[ToolEvent], final: bool) -> bool:
        body = self._buffer.lstrip()
        if body.startswith(_CLOSE):
            self._buffer = body[len(_CLOSE) :]
        elif _CLOSE.startswith(body):
            if final:
                self._buffer = ""  # cut off within the tag
            return False
        self._state = self._seek
        return True
