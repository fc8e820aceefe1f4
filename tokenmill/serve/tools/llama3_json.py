"""Llama 3: the entire answer is one object `{"name": ..., "parameters": {...}}`, or several with `;` between them.

An answer that begins with anything else is content to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tokenmill.serve.tools.base import ToolEvent
from tokenmill.serve.tools.functions import Function
from tokenmill.serve.tools.json_calls import JsonCallParser, object_rules

_TAG = "<|python_tag|>"
_BLANKS = " \t\r\n"


class Llama3Json(JsonCallParser):
    name: ClassVar[str] = "llama3_json"

    @classmethod
    def writes(cls, template: str) -> bool:
        return _TAG in template or '"parameters": dictionary of argument name' in template

    @classmethod
    def grammar(cls, functions: Sequence[Function], parallel: bool) -> str:
        calls = 'calls: call ("; " call)*\n' if parallel else "calls: call\n"
        return calls + object_rules(functions, "parameters", "", "")

    def _seek(self, events: list[ToolEvent], final: bool) -> bool:
        if self._full:
            return self._rest(events, final)
        body = self._buffer.lstrip(_BLANKS + ";," if self._num_calls else _BLANKS)
        if _TAG.startswith(body) and not final:
            return False  # nothing yet, or the beginning of the tag
        body = body.removeprefix(_TAG).lstrip(_BLANKS)
        if not body and not final:
            return False
        if body.startswith("{"):
            return self._begin_object(len(self._buffer) - len(body))
        self._state = self._rest
        return True

    def _close(self, _events: list[ToolEvent], _final: bool) -> bool:
        self._state = self._seek
        return True
