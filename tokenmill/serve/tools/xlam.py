"""Salesforce xLAM: the entire answer is a JSON array of calls, `[{"name": ..., "arguments": {...}}, ...]`.

Some models put it into a fenced block (with or without `json`), or announce it by `[TOOL_CALLS]` or `<tool_call>`;
these forms may follow other text. An array that begins later without any of them is content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tokenmill.serve.reasoning.scan import may_begin
from tokenmill.serve.tools.functions import Function
from tokenmill.serve.tools.json_calls import call_schemas, object_rules
from tokenmill.serve.tools.marked_calls import MarkedCallParser, array_rules

_FENCE, _LABEL = "```", "json"


class XLam(MarkedCallParser):
    name: ClassVar[str] = "xlam"
    openings: ClassVar[tuple[str, ...]] = (_FENCE, "[TOOL_CALLS]", "<tool_call>")
    closings: ClassVar[tuple[str, ...]] = (_FENCE, "</tool_call>")
    bare: ClassVar[bool] = True

    @classmethod
    def writes(cls, template: str) -> bool:
        return '[{"name": "func_name1", "arguments"' in template

    @classmethod
    def grammar(cls, functions: Sequence[Function], parallel: bool) -> str:
        return array_rules(object_rules(functions, "arguments", "", ""), "", "", parallel)

    @classmethod
    def grammar_beside_json(cls, functions: Sequence[Function], parallel: bool) -> str:
        from tokenmill.grammar.schemas import json_rule

        items = call_schemas(functions, "arguments", "#/items")
        schema = {"type": "array", "items": items, "minItems": 1, **({} if parallel else {"maxItems": 1})}
        return f"calls: {json_rule(schema)}\n"

    def _body(self) -> str | None:
        body = self._buffer[len(self._opening) :]
        if self._opening == _FENCE:
            if may_begin(body, (_LABEL,)):
                return None
            body = body.removeprefix(_LABEL)
        return body.lstrip()
