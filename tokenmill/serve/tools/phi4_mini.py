"""Phi-4-mini: a marker, then a JSON array of calls.

As Microsoft's samples ask for it: `functools[{"name": ..., "arguments": {...}}, ...]`, without a closing marker. With
the model's own template: `<|tool_call|>[...]<|/tool_call|>`, where both markers are control tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tokenmill.serve.tools.functions import Function
from tokenmill.serve.tools.json_calls import object_rules
from tokenmill.serve.tools.marked_calls import MarkedCallParser, array_rules


class Phi4Mini(MarkedCallParser):
    name: ClassVar[str] = "phi4_mini"
    marker: ClassVar[str] = "<|tool_call|>"
    openings: ClassVar[tuple[str, ...]] = ("functools", marker)
    closings: ClassVar[tuple[str, ...]] = ("<|/tool_call|>",)

    @classmethod
    def writes(cls, template: str) -> bool:
        return "<|/tool|>" in template or "functools[" in template

    @classmethod
    def grammar(cls, functions: Sequence[Function], parallel: bool) -> str:
        return array_rules(object_rules(functions, "arguments", "", ""), "functools", "", parallel)
