"""IBM Granite, when its template variable `thinking` is true.

3.2: `Here is my thought process: REASONING Here is my response: ANSWER`, sometimes with "Here's".
3.3: `<think>REASONING</think><response>ANSWER</response>`.
"""

from __future__ import annotations

from typing import ClassVar

from tokenmill.serve.reasoning.base import ReasoningEvent, TaggedReasoning, Visible
from tokenmill.serve.reasoning.scan import may_begin, overlap

_RESPONSE = "<response>"
_RESPONSE_END = "</response>"


class Granite(TaggedReasoning):
    name: ClassVar[str] = "granite"
    openings: ClassVar[tuple[str, ...]] = ("Here is my thought process:", "Here's my thought process:", "<think>")
    closings: ClassVar[tuple[str, ...]] = ("Here is my response:", "Here's my response:", "</think>")
    markers: ClassVar[tuple[str, ...]] = ("<think>", "</think>", _RESPONSE, _RESPONSE_END)

    def __init__(self, prompt: str = "") -> None:
        super().__init__(prompt)
        self._wrapped = False  # the answer is in response tags

    @classmethod
    def writes(cls, template: str) -> bool:
        return "Here is my thought process:" in template or ("<think>" in template and "<|start_of_role|>" in template)

    def _after(self, events: list[ReasoningEvent], final: bool) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._wrapped and may_begin(self._buffer, (_RESPONSE,)) and not final:
            return False
        if not self._wrapped and self._buffer.startswith(_RESPONSE):
            self._wrapped = True
            self._buffer = self._buffer.removeprefix(_RESPONSE).lstrip()
        return super()._after(events, final)

    def _visible(self, events: list[ReasoningEvent], final: bool) -> bool:
        if not self._wrapped:
            return super()._visible(events, final)
        end = self._buffer.find(_RESPONSE_END)
        held = 0 if final else overlap(self._buffer, (_RESPONSE_END,))
        certain = end if end >= 0 else len(self._buffer) - held
        if certain:
            events.append(Visible(self._buffer[:certain]))
        self._buffer = self._buffer[certain:]
        if end < 0:
            return False
        self._buffer = self._buffer.removeprefix(_RESPONSE_END)
        self._wrapped = False
        return True
