"""IBM Granite 3: a marker, then a JSON array: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`.

3.0, 3.2 and 3.3 write `<|tool_call|>`, 3.1 `<tool_call>`; the function-calling models (20B) write
`<function_call> {"name": ..., "arguments": {...}}` for each call. Granite 4 writes as Hermes does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tokenmill.serve.tools.functions import Function
from tokenmill.serve.tools.json_calls import object_rules
from tokenmill.serve.tools.marked_calls import MarkedCallParser, array_rules


class Granite(MarkedCallParser):
    name: ClassVar[str] = "granite"
    marker: ClassVar[str] = "<|tool_call|>"
    openings: ClassVar[tuple[str, ...]] = (marker, "<tool_call>", "<function_call>")
    closings: ClassVar[tuple[str, ...]] = ("</tool_call>",)

    @classmethod
    def writes(cls, template: str) -> bool:
        return "<|start_of_role|>" in template and "</tool_call>" not in template

    @classmethod
    def grammar(cls, functions: Sequence[Function], parallel: bool) -> str:
        return array_rules(object_rules(functions, "arguments", "", ""), cls.marker, "", parallel)
