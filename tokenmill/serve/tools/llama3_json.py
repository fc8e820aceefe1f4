"""Llama 3: the entire answer is one object `{"name": ..., "parameters": {...}}`, or several with `;` between them.

An answer that begins with anything else is content to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tokenmill.serve.reasoning.scan import may_begin
from tokenmill.serve.tools.base import ToolEvent
from tokenmill.serve.tools.functions import Function
from tokenmill.serve.tools.json_calls import JsonCallParser, call_schemas, object_rules

_BLANKS = " \t\r\n"


class Llama3Json(JsonCallParser):
    name: ClassVar[str] = "llama3_json"
    tag: ClassVar[str] = "<|python_tag|>"
    closing: ClassVar[str] = ""  # may follow a call

    @classmethod
    def writes(cls, template: str) -> bool:
        return cls.tag in template or '"parameters": dictionary of argument name' in template

    @classmethod
    def grammar(cls, functions: Sequence[Function], parallel: bool) -> str:
        calls = 'calls: call ("; " call)*\n' if parallel else "calls: call\n"
        return calls + object_rules(functions, "parameters", "", "")

    @classmethod
    def grammar_beside_json(cls, functions: Sequence[Function], parallel: bool) -> str:
        from tokenmill.grammar.schemas import json_rule

        calls = 'calls: call ("; " call)*\n' if parallel else "calls: call\n"
        return f"{calls}call: {json_rule(call_schemas(functions, 'parameters', '#'))}\n"

    def _seek(self, events: list[ToolEvent], final: bool) -> bool:
        if self._full:
            return self._rest(events, final)
        body = self._buffer.lstrip(_BLANKS + ";," if self._num_calls else _BLANKS)
        if self.tag.startswith(body) and not final:
            return False  # nothing yet, or the beginning of the tag
        body = body.removeprefix(self.tag).lstrip(_BLANKS)
        if not body and not final:
            return False
        if body.startswith("{"):
            return self._begin_object(len(self._buffer) - len(body))
        self._state = self._rest
        return True

    def _close(self, _events: list[ToolEvent], final: bool) -> bool:
        body = self._buffer.lstrip(_BLANKS)
        if self.closing and may_begin(body, (self.closing,)):
            if final:
                self._buffer = ""  # cut off within the tag
            return False
        if self.closing and body.startswith(self.closing):
            self._buffer = body[len(self.closing) :]
        self._state = self._seek
        return True
