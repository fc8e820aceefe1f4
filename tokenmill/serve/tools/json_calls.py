"""What the styles share that write a call as one JSON object with a name and arguments.

A scanner finds where a JSON object ends while it still comes in; a finished object becomes a call if it names a known
function; a forced one is passed on while it is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tokenmill.serve.tools.base import CallArguments, CallEnd, ToolEvent, ToolParser
from tokenmill.serve.tools.functions import Function

_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class ObjectScanner:
    """Finds the end of a JSON object that comes in pieces. Sees strings and brackets, nothing else."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> int | None:
        """The index in `text` just after the object's last bracket; None if that has not come yet."""
        for index, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return index + 1
        return None


def read_call(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """(name, arguments as JSON) of a call written as a JSON object; None if it is not a call of a known function."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
            return None
        arguments: Any = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):  # some models write JSON within JSON
            arguments = json.loads(arguments, parse_constant=_refuse)
        if not isinstance(arguments, dict):
            return None
        return value["name"], json.dumps(arguments, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


def read_arguments(name: str, text: str) -> tuple[str, str] | None:
    """(name, arguments as JSON) of a call whose arguments are `text`; None if they are not a JSON object."""
    try:
        arguments = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


class JsonCallParser(ToolParser):
    """Reads objects; a style says where one may begin (`_seek`) and what follows it (`_close`)."""

    def __init__(self, functions: Sequence[Function], certain: bool = False, parallel: bool = True) -> None:
        super().__init__(functions, certain, parallel)
        self._state: Callable[[list[ToolEvent], bool], bool] = self._seek
        self._scanner = ObjectScanner()
        self._object_start = 0  # index in the buffer; before it is what announced the object
        self._scanned = 0
        self._called_name = ""  # of a call whose name stands before its arguments, outside of the JSON

    def _seek(self, events: list[ToolEvent], final: bool) -> bool:
        raise NotImplementedError

    def _close(self, events: list[ToolEvent], final: bool) -> bool:
        raise NotImplementedError

    def _step(self, events: list[ToolEvent], final: bool) -> bool:
        return self._state(events, final)

    def _begin_object(self, start: int) -> bool:
        """The object begins at index `start` of the buffer."""
        self._object_start = self._scanned = start
        self._scanner = ObjectScanner()
        self._called_name = ""
        self._state = self._head if self._certain else self._read_object
        return True

    def _begin_arguments(self, events: list[ToolEvent], name: str, start: int) -> bool:
        """The arguments of a call of `name` begin at index `start` of the buffer."""
        self._begin_object(start)
        self._called_name = name
        self._state = self._read_object
        if self._certain:
            self._start(events, name)
            self._buffer = self._buffer[start:]
            self._state = self._arguments
        return True

    def _rest(self, events: list[ToolEvent], _final: bool) -> bool:
        """No more calls: all that comes is content."""
        self._say(events, self._buffer)
        self._buffer = ""
        return False

    def _read_object(self, events: list[ToolEvent], final: bool) -> bool:
        end = self._scanner.push(self._buffer[self._scanned :])
        if end is None:
            self._scanned = len(self._buffer)
            return self._rest(events, final) if final else False
        end += self._scanned
        text = self._buffer[self._object_start : end]
        call = read_arguments(self._called_name, text) if self._called_name else read_call(text, self._names)
        if call is None:
            self._say(events, self._buffer[:end])
            self._state = self._seek
        else:
            self._call(events, *call)
            self._state = self._close
        self._buffer = self._buffer[end:]
        return True

    def _head(self, events: list[ToolEvent], final: bool) -> bool:
        head = _HEAD.match(self._buffer, self._object_start)
        if head is None:
            return self._rest(events, final) if final else False
        self._start(events, head[1])
        self._buffer = self._buffer[head.end() :]
        self._scanner = ObjectScanner()
        self._state = self._arguments
        return True

    def _arguments(self, events: list[ToolEvent], _final: bool) -> bool:
        end = self._scanner.push(self._buffer)
        index, piece = self._num_calls - 1, self._buffer[:end]
        if piece:
            events.append(CallArguments(index, piece))
        self._buffer = self._buffer[len(piece) :]
        if end is None:
            return False
        events.append(CallEnd(index))
        self._state = self._close if self._called_name else self._tail
        return True

    def _tail(self, _events: list[ToolEvent], _final: bool) -> bool:
        """The bracket that closes the object around the arguments."""
        rest = self._buffer.lstrip()
        if not rest:
            return False
        self._buffer = rest.removeprefix("}")
        self._state = self._close
        return True


def named_rules(functions: Sequence[Function], before: str, between: str, after: str) -> str:
    """Rules of a Lark grammar: `call` is one of the functions as its name, then its arguments as an object."""
    from tokenmill.grammar.schemas import json_rule

    rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(functions)))]
    for number, function in enumerate(functions):
        head = json.dumps(f"{before}{function.name}{between}", ensure_ascii=False)
        end = json.dumps(after, ensure_ascii=False) if after else ""
        rules.append(f"call_{number}: {head} arguments_{number} {end}")
        rules.append(f"arguments_{number}: {json_rule(dict(function.parameters))}")
    return "\n".join(rules) + "\n"


def object_rules(functions: Sequence[Function], key: str, before: str, after: str) -> str:
    """Rules of a Lark grammar: `call` is one of the functions as an object, between two literal texts."""
    from tokenmill.grammar.schemas import json_rule

    rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(functions)))]
    for number, function in enumerate(functions):
        head = json.dumps(f'{before}{{"name": "{function.name}", "{key}": ')
        rules.append(f"call_{number}: {head} arguments_{number} {json.dumps('}' + after)}")
        rules.append(f"arguments_{number}: {json_rule(dict(function.parameters))}")
    return "\n".join(rules) + "\n"


def call_schemas(functions: Sequence[Function], key: str, place: str) -> dict[str, Any]:
    """A JSON schema of a call of any of the functions. `place`: the JSON pointer to it in the schema it is part of."""

    def schema(number: int, function: Function) -> dict[str, Any]:
        root = f"{place}/anyOf/{number}/properties/{key}"
        properties = {"name": {"const": function.name}, key: _moved(dict(function.parameters), root)}
        return {
            "type": "object",
            "properties": properties,
            "required": ["name", key],
            "additionalProperties": False,
        }

    return {"anyOf": [schema(number, function) for number, function in enumerate(functions)]}


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references within itself hold where it is part of another one, at `root`."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: value if name in ("const", "enum") else _moved(value, root) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = root + reference[1:]
    return moved


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
