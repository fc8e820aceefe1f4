"""The contract of a reasoning style: which part of an answer is reasoning and which is for the user, piece by piece.

A parser is fed text as it comes and returns events; the complete answer is the fold of those events, so streamed and
complete answers are the same by construction. Blanks around the reasoning belong to neither part. Knows no tools, no
HTTP and no tokens; what is for the user may still hold tool calls, which the tool-call parser reads next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from tokenmill.serve.reasoning.scan import earliest, may_begin, overlap


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Visible:
    text: str


ReasoningEvent = Reasoning | Visible


class ReasoningParser(ABC):
    """Reads one answer to `prompt`, the rendered conversation, whose end may already open or close the reasoning."""

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]]  # must be visible in the text even if they are control tokens of the model
    closing: ClassVar[str] = ""  # ends the reasoning, in a grammar; empty if a grammar cannot say where it ends
    end_marker: ClassVar[str] = ""  # by which tokens of the reasoning are counted

    def __init__(self, _prompt: str = "") -> None:
        self._buffer = ""

    @classmethod
    @abstractmethod
    def writes(cls, template: str) -> bool:
        """Whether a chat template belongs to a model of this style."""

    @abstractmethod
    def _step(self, events: list[ReasoningEvent], final: bool) -> bool:
        """Consume part of the buffer; False if more text is needed. With `final` there will be none."""

    def feed(self, text: str) -> list[ReasoningEvent]:
        self._buffer += text
        return self._run(False)

    def finish(self) -> list[ReasoningEvent]:
        """The answer has ended: events for the text that is still held back."""
        return self._run(True)

    def _run(self, final: bool) -> list[ReasoningEvent]:
        events: list[ReasoningEvent] = []
        while self._step(events, final):
            pass
        return events


class TaggedReasoning(ReasoningParser):
    """Reasoning at the start of the answer, between an opening and a closing text."""

    openings: ClassVar[tuple[str, ...]]
    closings: ClassVar[tuple[str, ...]]
    implied: ClassVar[bool] = False  # an answer without an opening text begins with reasoning too

    def __init__(self, prompt: str = "") -> None:
        super().__init__(prompt)
        states = {"inside": self._inside, "closed": self._visible, "open": self._begin}
        self._state: Callable[[list[ReasoningEvent], bool], bool] = states[self.phase(prompt)]
        self._blanks = ""  # held back: dropped at the end of the reasoning
        self._said = False  # some reasoning

    @classmethod
    def phase(cls, prompt: str) -> str:
        """Where an answer to `prompt` begins: "inside" the reasoning, after it ("closed"), or "open": it may follow."""
        end = prompt.rstrip()
        if end.endswith(cls.openings):
            return "inside"
        return "closed" if end.endswith(cls.closings) else "open"

    def _step(self, events: list[ReasoningEvent], final: bool) -> bool:
        return self._state(events, final)

    def _begin(self, _events: list[ReasoningEvent], final: bool) -> bool:
        body = self._buffer.lstrip()
        opening = next((each for each in self.openings if body.startswith(each)), None)
        if opening is not None:
            self._buffer = body[len(opening) :]
            self._state = self._inside
        elif may_begin(body, self.openings) and not final:
            return False
        else:
            self._state = self._inside if self.implied else self._visible
        return True

    def _inside(self, events: list[ReasoningEvent], final: bool) -> bool:
        found = earliest(self._buffer, self.closings)
        if found is not None:
            index, closing = found
            self._reason(events, self._buffer[:index])
            self._buffer = self._buffer[index + len(closing) :]
            self._state = self._after
            return True
        held = 0 if final else overlap(self._buffer, self.closings)
        certain = len(self._buffer) - held
        self._reason(events, self._buffer[:certain])
        self._buffer = self._buffer[certain:]
        return False

    def _reason(self, events: list[ReasoningEvent], text: str) -> None:
        text = self._blanks + text
        if not self._said:
            text = text.lstrip()
        visible = text.rstrip()
        self._blanks = text[len(visible) :]
        if visible:
            self._said = True
            events.append(Reasoning(visible))

    def _after(self, _events: list[ReasoningEvent], _final: bool) -> bool:
        """Blanks between the reasoning and the answer."""
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        self._state = self._visible
        return True

    def _visible(self, events: list[ReasoningEvent], _final: bool) -> bool:
        if self._buffer:
            events.append(Visible(self._buffer))
        self._buffer = ""
        return False
