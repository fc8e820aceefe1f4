"""The functions a client offers, checked: name, description and a schema of the arguments.

Every refusal is a UserError. Knows nothing of how models write calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.errors import UserError

MAX_FUNCTIONS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_REMEDY = 'a tool is {"type": "function", "function": {"name": "...", "parameters": {...}}}'


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    parameters: Mapping[str, Any]  # a JSON schema of an object


def read_functions(tools: Sequence[Mapping[str, Any]]) -> list[Function]:
    if len(tools) > MAX_FUNCTIONS:
        raise UserError(f"there are {len(tools)} tools", f"give at most {MAX_FUNCTIONS}")
    functions = [_function(number, tool) for number, tool in enumerate(tools)]
    names = [each.name for each in functions]
    if len(set(names)) < len(names):
        raise UserError("two tools have the same name", "rename one of them")
    return functions


def _function(number: int, tool: Mapping[str, Any]) -> Function:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise UserError(f"tool {number} is not a function", _REMEDY)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(
            f"tool {number} has no usable name", "give 1 to 64 letters, digits, dots, dashes or underscores"
        )
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not _describes_object(parameters):
        raise UserError(f"the parameters of tool '{name}' are not the schema of an object", _REMEDY)
    return Function(name, {"type": "object", **parameters})


def _describes_object(schema: object) -> bool:
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        return False
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    names = isinstance(required, list) and all(isinstance(each, str) for each in required)
    return names and isinstance(properties, Mapping)
