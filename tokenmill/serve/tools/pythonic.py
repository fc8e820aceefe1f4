"""Llama 3.2 and others: the entire answer is a Python list of calls, `[f(a=1, b="x"), g()]`.

Read as Python literals, never run; `true`, `false` and `null` count too. An answer that begins otherwise is content.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Sequence
from keyword import iskeyword
from typing import Any, ClassVar

from tokenmill.errors import UserError
from tokenmill.serve.reasoning.scan import may_begin
from tokenmill.serve.tools.base import ToolEvent, ToolParser
from tokenmill.serve.tools.functions import Function

_CONSTANTS = {"true": True, "false": False, "null": None}
_PLAIN = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "title", "description",
          "$schema", "strict"}  # fmt: skip


class Pythonic(ToolParser):
    name: ClassVar[str] = "pythonic"
    opening: ClassVar[str] = ""  # may stand before the list
    closing: ClassVar[str] = ""  # may follow it

    def __init__(self, functions: Sequence[Function], certain: bool = False, parallel: bool = True) -> None:
        super().__init__(functions, certain, parallel)
        self._scanner: ListScanner | None = None
        self._scanned = 0
        self._over = False
        self._closed = False

    @classmethod
    def writes(cls, template: str) -> bool:
        return "func_name1(params_name1=params_value1" in template

    @classmethod
    def grammar(cls, functions: Sequence[Function], parallel: bool) -> str:
        calls = 'calls: "[" call (", " call)* "]"\n' if parallel else 'calls: "[" call "]"\n'
        rules = [calls + "call: " + " | ".join(f"call_{number}" for number in range(len(functions)))]
        for number, function in enumerate(functions):
            rules += _call_rules(number, function)
        return "\n".join(rules) + "\n"

    def _step(self, events: list[ToolEvent], final: bool) -> bool:
        if not self._over and self._scanner is None:
            body = self._buffer.lstrip()
            if may_begin(body, (self.opening,)) and not final:
                return False
            body = body.removeprefix(self.opening).lstrip()
            if not body and not final:
                return False
            self._over = not body.startswith("[")
            self._scanner = ListScanner()
            self._scanned = len(self._buffer) - len(body)
        if not self._over:
            assert self._scanner is not None
            end = self._scanner.push(self._buffer[self._scanned :])
            if end is None and not final:
                self._scanned = len(self._buffer)
                return False
            self._over = True
            if end is not None:
                self._take_list(events, self._scanned + end)
        if self._num_calls and not self._closed:
            body = self._buffer.lstrip()
            if may_begin(body, (self.closing,)) and not final:
                return False
            self._buffer = "" if may_begin(body, (self.closing,)) else self._buffer
            self._buffer = body[len(self.closing) :] if self.closing and body.startswith(self.closing) else self._buffer
            self._closed = True
        self._say(events, self._buffer)
        self._buffer = ""
        return False

    def _take_list(self, events: list[ToolEvent], end: int) -> None:
        calls = read_calls(self._buffer[:end].strip().removeprefix(self.opening).strip(), self._names)
        if not calls or (len(calls) > 1 and not self._parallel):
            return  # stays in the buffer, which becomes content
        for name, arguments in calls:
            self._call(events, name, arguments)
        self._buffer = self._buffer[end:]


class ListScanner:
    """Finds the end of a bracketed Python expression that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def push(self, text: str) -> int | None:
        for index, character in enumerate(text):
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in "\"'":
                self._quote = character
            elif character in "([{":
                self._depth += 1
            elif character in ")]}":
                self._depth -= 1
                if self._depth == 0:
                    return index + 1
        return None


def read_calls(text: str, names: Collection[str]) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON) of each call of a list; None if it is anything else."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List):
            return None
        return [_read_call(node, names) for node in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _read_call(node: ast.expr, names: Collection[str]) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    name = ast.unparse(node.func)
    if name not in names:
        raise ValueError("unknown function")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("** is not a named argument")
        arguments[keyword.arg] = _value(keyword.value)
    return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, (str, bool, int, float)):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if type(value) in (int, float):
            return -value  # type: ignore[operator]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(each) for each in elements]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key is not a text")


def _call_rules(number: int, function: Function) -> list[str]:
    """A call with the required arguments, then any of the others, in the order of the schema."""
    from tokenmill.grammar.schemas import json_rule

    schema = function.parameters
    unknown = set(schema) - _PLAIN
    if unknown:
        raise UserError(
            f"the parameters of '{function.name}' use {', '.join(sorted(unknown))}",
            "this model's style of calls can be forced only with plain properties",
        )
    properties, required = dict(schema.get("properties") or {}), set(schema.get("required") or ())
    names = (*properties, *required, *function.name.split("."))
    if any(not each.isidentifier() or iskeyword(each) for each in names) or not required <= set(properties):
        raise UserError(f"a call of '{function.name}' cannot be written in Python", "use plain names")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rules, parts = [], []
    for index, key in enumerate(sorted(properties, key=lambda name: name not in required)):
        rule = f"value_{number}_{index}"
        own = properties[key] if isinstance(properties[key], dict) else {}
        rules.append(f"{rule}: {json_rule({**own, **shared})}")
        parts.append((json.dumps(f"{key}="), rule, key in required))
    return [f'call_{number}: {json.dumps(function.name + "(")} {_listed(number, parts, rules)} ")"', *rules]


def _listed(number: int, parts: list[tuple[str, str, bool]], rules: list[str]) -> str:
    """Arguments with commas between them: the required ones come first, so a comma follows what was there."""
    needed = ' ", " '.join(f"{key} {rule}" for key, rule, required in parts if required)
    optional = [f"{key} {rule}" for key, rule, required in parts if not required]
    if needed:
        return " ".join([needed, *(f'(", " {each})?' for each in optional)])
    for index, each in enumerate(optional):  # the first that is present has no comma before it
        rest = " ".join(f'(", " {other})?' for other in optional[index + 1 :])
        rules.append(f"first_{number}_{index}: {each} {rest}")
    return f"({' | '.join(f'first_{number}_{index}' for index in range(len(optional)))})?" if optional else ""
