"""Qwen3-Coder: calls in tags, one per parameter, values as plain text.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE, possibly of several lines
    </parameter>
    </function>
    </tool_call>

A value is read by the type that the schema of the parameter states: text as it stands between the line ends, everything
else as JSON. The model sometimes leaves the outer tags out; they are then not missed.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from tokenmill.errors import UserError
from tokenmill.serve.reasoning.scan import earliest, may_begin, overlap
from tokenmill.serve.tools.base import ToolEvent, ToolParser
from tokenmill.serve.tools.functions import Function

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_MAX_NAME = 128  # characters
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class Qwen3Coder(ToolParser):
    name: ClassVar[str] = "qwen3_coder"
    marker: ClassVar[str] = _OPEN

    def __init__(self, functions: Sequence[Function], certain: bool = False, parallel: bool = True) -> None:
        super().__init__(functions, certain, parallel)
        self._in_call = False
        self._closing = False  # after a call: its outer tag may follow
        self._called = ""
        self._values: dict[str, str] = {}
        self._position = 0  # in the buffer: before it everything belongs to the call

    @classmethod
    def writes(cls, template: str) -> bool:
        return _FUNCTION in template and _PARAMETER in template

    @classmethod
    def grammar(cls, functions: Sequence[Function], parallel: bool) -> str:
        rules = ['calls: call ("\\n" call)*' if parallel else "calls: call"]
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(functions))))
        for number, function in enumerate(functions):
            rules += _call_rules(number, function)
        return "\n".join(rules) + "\n"

    def _step(self, events: list[ToolEvent], final: bool) -> bool:
        if self._in_call:
            return self._read(events, final)
        if self._closing:
            return self._close(final)
        return self._seek(events, final)

    def _seek(self, events: list[ToolEvent], final: bool) -> bool:
        markers = () if self._full else (_OPEN, _FUNCTION)
        found = earliest(self._buffer, markers)
        if found is None:
            certain = len(self._buffer) - (0 if final else overlap(self._buffer, markers))
            self._say(events, self._buffer[:certain])
            self._buffer = self._buffer[certain:]
            return False
        self._say(events, self._buffer[: found[0]])
        self._buffer = self._buffer[found[0] :]
        body = self._buffer.removeprefix(_OPEN).lstrip()
        if may_begin(body, (_FUNCTION,)) and not final:
            return False
        if not body.startswith(_FUNCTION):
            return self._no_call(events)
        end = body.find(">", 0, _MAX_NAME)
        if end < 0:
            return self._no_call(events) if final or len(body) >= _MAX_NAME else False
        self._called = body[len(_FUNCTION) : end].strip().strip("\"'")
        if self._called not in self._names:
            return self._no_call(events)
        self._in_call, self._values = True, {}
        self._position = len(self._buffer) - len(body) + end + 1
        return True

    def _read(self, events: list[ToolEvent], final: bool) -> bool:
        """The next parameter, or the end of the call."""
        rest = self._buffer[self._position :]
        body = rest.lstrip()
        if body.startswith(_FUNCTION_END):
            self._end(events, len(self._buffer) - len(body) + len(_FUNCTION_END))
            return True
        if may_begin(body, (_FUNCTION_END, _PARAMETER)):
            return self._no_call(events) if final else False
        end = body.find(">", 0, _MAX_NAME)
        if not body.startswith(_PARAMETER) or (end < 0 and (final or len(body) >= _MAX_NAME)):
            return self._no_call(events)
        close = body.find(_PARAMETER_END, end)
        if end < 0 or close < 0:
            return self._no_call(events) if final else False
        key = body[len(_PARAMETER) : end].strip().strip("\"'")
        self._values[key] = body[end + 1 : close].removeprefix("\n").removesuffix("\n")
        self._position = len(self._buffer) - len(body) + close + len(_PARAMETER_END)
        return True

    def _end(self, events: list[ToolEvent], end: int) -> None:
        properties = self._functions[self._called].parameters.get("properties") or {}
        arguments = {key: read_value(text, properties.get(key)) for key, text in self._values.items()}
        self._call(events, self._called, json.dumps(arguments, ensure_ascii=False))
        self._buffer = self._buffer[end:]
        self._in_call, self._closing = False, True

    def _close(self, final: bool) -> bool:
        body = self._buffer.lstrip()
        if may_begin(body, (_CLOSE,)):
            if final:
                self._buffer = ""  # cut off within the tag
            return False
        if body.startswith(_CLOSE):
            self._buffer = body[len(_CLOSE) :]
        self._closing = False
        return True

    def _no_call(self, events: list[ToolEvent]) -> bool:
        """It was only text; what follows its first tag may still hold a call."""
        opening = _OPEN if self._buffer.startswith(_OPEN) else _FUNCTION
        self._say(events, opening)
        self._buffer = self._buffer[len(opening) :]
        self._in_call = False
        return True


def read_value(text: str, schema: object) -> Any:
    """The value that a parameter's text means under its schema."""
    types = _types(schema)
    if types == {"string"}:
        return text
    readers: tuple[Callable[[str], Any], ...] = (json.loads, ast.literal_eval) if types else (json.loads,)
    allowed = tuple(each for name in types for each in _TYPES.get(name, ()))
    for reader in readers:
        try:
            value = reader(text.strip())
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        fits = isinstance(value, allowed) and (not isinstance(value, bool) or "boolean" in types)
        if not types or (fits and not isinstance(value, str)):
            return value
    return text


def _types(schema: object) -> set[str]:
    """The types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    stated = schema.get("type")
    types: set[str] = {stated} if isinstance(stated, str) else set(stated) if isinstance(stated, list) else set()
    for branch in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        types |= _types(branch)
    if not types and isinstance(schema.get("enum"), list):
        types = {name for value in schema["enum"] for name, kinds in _TYPES.items() if type(value) in kinds}
    return types


def _call_rules(number: int, function: Function) -> list[str]:
    """A call with the required parameters, then any of the others, in the order of the schema."""
    from tokenmill.grammar.schemas import json_rule

    schema = function.parameters
    properties, required = dict(schema.get("properties") or {}), set(schema.get("required") or ())
    if not required <= set(properties) or not all(re.fullmatch(r"[\w.-]+", key) for key in properties):
        raise UserError(f"a call of '{function.name}' cannot be written in this model's style", "use plain names")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rules, parts = [], []
    for index, key in enumerate(sorted(properties, key=lambda name: name not in required)):
        own = properties[key] if isinstance(properties[key], Mapping) else {}
        rule, head = f"value_{number}_{index}", json.dumps(f"{_PARAMETER}{key}>\n")
        end = json.dumps(f"\n{_PARAMETER_END}\n")
        if _types(own) == {"string"} and "enum" not in own:
            rules.append(f"{rule}[suffix={end}]: /[\\s\\S]*/")
            part = f"{head} {rule}"
        else:
            texts = own.get("enum")
            if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
                rules.append(f"{rule}: " + " | ".join(json.dumps(text) for text in texts))
            else:
                rules.append(f"{rule}: {json_rule({**own, **shared})}")
            part = f"{head} {rule} {end}"
        parts.append(part if key in required else f"({part})?")
    head = json.dumps(f"{_OPEN}\n{_FUNCTION}{function.name}>\n")
    end = json.dumps(f"{_FUNCTION_END}\n{_CLOSE}")
    return [f"call_{number}: {head} {' '.join(parts)} {end}", *rules]
