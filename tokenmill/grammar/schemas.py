"""JSON schemas as a request states them: read, checked for what the grammar library would accept but not enforce, and
written as a rule of a Lark grammar. Knows no tokens; used by the grammar's source and by structural tags.
"""

from __future__ import annotations

import json
from typing import Any

from tokenmill.errors import UserError

# Bounded, so that a model cannot fill its context with blanks. Long enough for deep indentation.
WHITESPACE = r"[ \n\r\t]{1,40}"
JSON_OPTIONS: dict[str, Any] = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": WHITESPACE}
_MAX_DEPTH = 64
_SMALLEST = -(2**63)  # as a constant it overflows the library's stack: one small schema would end the process


def read_schema(text: str) -> dict[str, Any]:
    """A schema from its text. Raises UserError if it is none."""
    try:
        schema = json.loads(text, parse_int=_integer, parse_float=_number, parse_constant=_no_constant)
    except RecursionError:
        raise UserError("the json_schema is nested too deeply", f"keep it below {_MAX_DEPTH} levels") from None
    except ValueError as error:
        raise UserError(f"the json_schema is not JSON: {error}", "correct it") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise UserError("the json_schema is not an object that anything can match", "give a JSON object")
    _check(schema)
    try:
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError("the json_schema has half a surrogate pair in it", "send valid Unicode text") from None
    return schema


def _integer(text: str) -> int:
    value = int(text)
    if abs(value - _SMALLEST) <= 1024:  # the same float
        raise ValueError(f"{value} is too small for a number")
    return value


def _number(text: str) -> int | float:
    """Counts may be written 2.0; the library wants 2. To JSON they are the same number."""
    value = float(text)
    if value == _SMALLEST:
        raise ValueError(f"{text} is too small for a number")
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _check(schema: dict[str, Any]) -> None:
    """Reject what the library would accept but not enforce."""
    level: list[Any] = [schema]
    for _ in range(_MAX_DEPTH):
        objects = [each for each in level if isinstance(each, dict)]
        for each in objects:
            min_properties, required = each.get("minProperties"), each.get("required")
            # The library counts keys as they are written, and unnamed keys can be written twice.
            if isinstance(min_properties, int) and min_properties > 1 + (
                len(required) if isinstance(required, list) else 0
            ):
                raise UserError(
                    "the json_schema cannot be used: minProperties requires two or more keys that it does not name",
                    "name them in properties and required",
                )
        lists = [each for each in level if isinstance(each, list)]
        level = [child for each in objects for child in each.values()] + [child for each in lists for child in each]
        if not level:
            return
    raise UserError("the json_schema is nested too deeply", f"keep it below {_MAX_DEPTH} levels")


def json_rule(schema: dict[str, Any]) -> str:
    """`schema` inside a Lark grammar, with the options of a schema of its own."""
    _check(schema)
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS})
