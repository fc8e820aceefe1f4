"""The contract of a tool-call style: how a model writes calls in its text, read piece by piece, and how to force one.

A parser is fed text as it comes and returns events; the complete answer is the fold of those events, so streamed and
complete answers are the same by construction. Text that looks like a call but is none becomes content;
only blanks around calls are dropped. Knows no HTTP and no tokens.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from tokenmill.serve.reasoning.base import Reasoning
from tokenmill.serve.tools.functions import Function


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    text: str  # a piece of JSON


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int


ToolEvent = Reasoning | Content | CallStart | CallArguments | CallEnd


@dataclass(slots=True)
class ToolCall:
    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def fold(events: Iterable[ToolEvent]) -> Answer:
    """What a stream of events amounts to."""
    answer = Answer()
    for event in events:
        match event:
            case Content(text=text):
                answer.content += text
            case Reasoning(text=text):
                answer.reasoning += text
            case CallStart(call_id=call_id, name=name):
                answer.calls.append(ToolCall(call_id, name))
            case CallArguments(index=index, text=text):
                answer.calls[index].arguments += text
            case CallEnd():
                pass
    return answer


class ToolParser(ABC):
    """Reads one answer. `functions` are those there are: a call of another is content.

    `certain`: a grammar forced the calls, so arguments are passed on as they come; otherwise a call is announced only
    when all of it has been read and is good. `parallel`: more than one call may come.
    """

    name: ClassVar[str]
    marker: ClassVar[str] = ""  # must be visible in the text even if it is a control token of the model
    reads_reasoning: ClassVar[bool] = False  # the style tells reasoning apart itself; no reasoning parser comes first

    def __init__(self, functions: Sequence[Function], certain: bool = False, parallel: bool = True) -> None:
        self._functions = {function.name: function for function in functions}
        self._names = frozenset(self._functions)
        self._certain = certain
        self._parallel = parallel
        self._buffer = ""
        self._blanks = ""  # held back: dropped if a call follows
        self._num_calls = 0

    @classmethod
    @abstractmethod
    def writes(cls, template: str) -> bool:
        """Whether a chat template asks the model for this style."""

    @classmethod
    @abstractmethod
    def grammar(cls, functions: Sequence[Function], parallel: bool) -> str:
        """Rules of a Lark grammar, with `calls` on top, for nothing but calls of these functions."""

    @classmethod
    def grammar_beside_json(cls, functions: Sequence[Function], parallel: bool) -> str:
        """The same, for an answer that may be JSON instead of calls. The grammar library's lexer takes the longest
        text that fits, so calls that begin like JSON must be made of JSON's own lexemes."""
        return cls.grammar(functions, parallel)

    @abstractmethod
    def _step(self, events: list[ToolEvent], final: bool) -> bool:
        """Consume part of the buffer; False if more text is needed. With `final` there will be none."""

    def feed(self, text: str) -> list[ToolEvent]:
        self._buffer += text
        return self._run(False)

    def finish(self) -> list[ToolEvent]:
        """The answer has ended: events for the text that is still held back."""
        events = self._run(True)
        if self._blanks and not self._num_calls:
            events.append(Content(self._blanks))
        self._blanks = ""
        return events

    def _run(self, final: bool) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        while self._step(events, final):
            pass
        return events

    # --- for the styles ---

    def _say(self, events: list[ToolEvent], text: str) -> None:
        text = self._blanks + text
        visible = text.rstrip()
        self._blanks = text[len(visible) :]
        if visible:
            events.append(Content(visible))

    def _new_id(self) -> str:
        return f"call_{uuid.uuid4().hex[:24]}"

    def _start(self, events: list[ToolEvent], name: str) -> int:
        """Announce a call; returns its index."""
        self._blanks = ""
        index = self._num_calls
        self._num_calls += 1
        events.append(CallStart(index, self._new_id(), name))
        return index

    def _call(self, events: list[ToolEvent], name: str, arguments: str) -> None:
        index = self._start(events, name)
        events += [CallArguments(index, arguments), CallEnd(index)]

    @property
    def _full(self) -> bool:
        """No further call may come."""
        return self._num_calls > 0 and not self._parallel
