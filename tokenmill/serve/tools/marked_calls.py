"""What the styles share that announce calls by a marker: a JSON array of calls after it, or a name and its arguments.

A style states its markers and, where a name stands outside of the JSON, the pattern of what comes before the
arguments. What follows a marker and is no call is content, the marker included.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import ClassVar

from tokenmill.serve.reasoning.scan import earliest, may_begin, overlap
from tokenmill.serve.tools.base import ToolEvent
from tokenmill.serve.tools.functions import Function
from tokenmill.serve.tools.json_calls import JsonCallParser

_MAX_HEADER = 256  # characters from the marker to the arguments


class MarkedCallParser(JsonCallParser):
    openings: ClassVar[tuple[str, ...]]
    closings: ClassVar[tuple[str, ...]] = ()  # any of them may follow calls, in any order
    bare: ClassVar[bool] = False  # an answer may also begin with the array itself
    header: ClassVar[re.Pattern[str] | None] = None  # from the marker to the arguments; its one group is the name

    def __init__(self, functions: Sequence[Function], certain: bool = False, parallel: bool = True) -> None:
        super().__init__(functions, certain, parallel)
        self._opening = ""
        self._in_array = False
        if self.bare:
            self._state = self._begin

    def _begin(self, _events: list[ToolEvent], final: bool) -> bool:
        """The beginning of an answer, which may be the array."""
        body = self._buffer.lstrip()
        if not body and not final:
            return False
        self._opening = ""
        self._state = self._opened if body.startswith("[") and not body.startswith(self.openings) else self._seek
        if body and may_begin(body, self.openings) and not final:
            self._state = self._begin  # a marker may begin with the same bracket
            return False
        return True

    def _seek(self, events: list[ToolEvent], final: bool) -> bool:
        if self._full:
            return self._rest(events, final)
        found = earliest(self._buffer, self.openings)
        if found is not None:
            start, self._opening = found
            self._say(events, self._buffer[:start])
            self._buffer = self._buffer[start:]
            self._state = self._opened
            return True
        certain = len(self._buffer) - (0 if final else overlap(self._buffer, self.openings))
        self._say(events, self._buffer[:certain])
        self._buffer = self._buffer[certain:]
        return False

    def _opened(self, events: list[ToolEvent], final: bool) -> bool:
        """The buffer begins with the marker."""
        body = self._body()
        if body is None or not body:
            return self._no_call(events) if final else False
        if body.startswith("{"):
            self._in_array = False
            return self._begin_object(len(self._buffer) - len(body))
        if body.startswith("["):
            inner = body[1:].lstrip()
            if not inner:
                return self._no_call(events) if final else False
            if inner.startswith("{"):
                self._in_array = True
                return self._begin_object(len(self._buffer) - len(inner))
            return self._no_call(events)
        return self._named(events, final) if self.header is not None else self._no_call(events)

    def _body(self) -> str | None:
        """What follows the marker; None if more text is needed to know."""
        return self._buffer[len(self._opening) :].lstrip()

    def _named(self, events: list[ToolEvent], final: bool) -> bool:
        """A name, then arguments: nothing but these may stand before the first bracket."""
        assert self.header is not None
        start = self._buffer.find("{", 0, _MAX_HEADER)
        if start < 0:
            return self._no_call(events) if final or len(self._buffer) >= _MAX_HEADER else False
        head = self.header.fullmatch(self._buffer, 0, start)
        name = next(filter(None, head.groups()), "") if head is not None else ""
        if name not in self._names:
            return self._no_call(events)
        self._in_array = False
        return self._begin_arguments(events, name, start)

    def _no_call(self, events: list[ToolEvent]) -> bool:
        """It was only text; what follows the marker may still hold another one."""
        self._say(events, self._opening)
        self._buffer = self._buffer[len(self._opening) :]
        self._state = self._seek
        return True

    def _close(self, _events: list[ToolEvent], final: bool) -> bool:
        if not self._in_array:
            self._state = self._after
            return True
        body = self._buffer.lstrip()
        if body.startswith("]"):
            self._buffer = body[1:]
            self._in_array = False
            return True
        inner = body[1:].lstrip() if body.startswith(",") else body
        if not inner:
            if final:
                self._buffer = ""  # cut off within the array
            return False
        if body.startswith(",") and inner.startswith("{") and not self._full:
            return self._begin_object(len(self._buffer) - len(inner))
        self._state = self._rest if self._full else self._seek
        return True

    def _after(self, _events: list[ToolEvent], final: bool) -> bool:
        body = self._buffer.lstrip()
        closing = next((each for each in self.closings if body.startswith(each)), None)
        if closing is not None:
            self._buffer = body[len(closing) :]
            return True
        if self.closings and may_begin(body, self.closings):
            if final:
                self._buffer = ""  # cut off within the closing text
            return False
        self._state = self._seek
        return True


def array_rules(call_rules: str, before: str, after: str, parallel: bool) -> str:
    """Rules of a Lark grammar around those of `call`: a JSON array of calls between two literal texts."""
    head, end = json.dumps(before + "[", ensure_ascii=False), json.dumps("]" + after, ensure_ascii=False)
    more = ' (", " call)*' if parallel else ""
    return f"calls: {head} call{more} {end}\n{call_rules}"
