"""Mistral: `[TOOL_CALLS]`, a control token, then the calls.

Until tokenizer v7 one JSON array: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`. From v11 on each call has a
marker of its own and its name outside of the JSON: `[TOOL_CALLS]NAME[ARGS]{...}[TOOL_CALLS]NAME[ARGS]{...}`, in v11
itself with `[CALL_ID]ID` after the name. The chat templates accept only ids of nine letters and digits.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import ClassVar

from tokenmill.serve.tools.functions import Function
from tokenmill.serve.tools.json_calls import object_rules
from tokenmill.serve.tools.marked_calls import MarkedCallParser, array_rules

_MARKER = "[TOOL_CALLS]"
_ID_LENGTH = 9


class Mistral(MarkedCallParser):
    name: ClassVar[str] = "mistral"
    marker: ClassVar[str] = _MARKER
    openings: ClassVar[tuple[str, ...]] = (_MARKER,)
    header: ClassVar[re.Pattern[str] | None] = re.compile(
        re.escape(_MARKER) + r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\]\s*)?"
    )

    @classmethod
    def writes(cls, template: str) -> bool:
        return _MARKER in template

    @classmethod
    def grammar(cls, functions: Sequence[Function], parallel: bool) -> str:
        return array_rules(object_rules(functions, "arguments", "", ""), _MARKER, "", parallel)

    def _new_id(self) -> str:
        return uuid.uuid4().hex[:_ID_LENGTH]
