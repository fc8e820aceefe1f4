"""Structural tags: free text in which certain beginnings must be followed by JSON of a schema and an end.

Reads both forms that vLLM takes (`structures` with `triggers`, and the newer `format` of type triggered_tags) and
writes a Lark grammar: text runs on until a trigger appears, from there on one of its tags holds. Knows no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.errors import UserError
from tokenmill.grammar.schemas import json_rule, read_schema

_MAX_TAGS = 128
_REMEDY = (
    'write {"structures": [{"begin": "<f=a>", "schema": {...}, "end": "</f>"}], "triggers": ["<f="]} '
    'or {"format": {"type": "triggered_tags", ...}}'
)


@dataclass(frozen=True, slots=True)
class Tag:
    begin: str
    schema: dict[str, Any]
    end: str


@dataclass(frozen=True, slots=True)
class StructuralTags:
    triggers: tuple[str, ...]
    tags: tuple[Tag, ...]
    required: bool = False  # at least one tag
    single: bool = False  # the output ends after the first tag


def read_tags(text: str) -> StructuralTags:
    """Raises UserError for what is no structural tag, or of a kind that is not supported."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError("the structural_tag is not a JSON object", _REMEDY)
    form = value.get("format")
    if form is None:
        found = _read(value, value.get("structures"), lambda tag: tag.get("schema"))
    elif isinstance(form, dict) and form.get("type") == "triggered_tags":
        found = _read(form, form.get("tags"), _content_schema)
    else:
        kind = form.get("type") if isinstance(form, dict) else form
        raise UserError(f"the structural_tag has a format of type {str(kind)[:40]!r}", "use triggered_tags")
    return found


def tags_grammar(tags: StructuralTags) -> str:
    """A Lark grammar. Triggers are lazy lexemes: text cannot run past one."""
    rules, options = [], []
    for number, trigger in enumerate(tags.triggers):
        own = [index for index, tag in enumerate(tags.tags) if tag.begin.startswith(trigger)]
        rules.append(f"opening_{number}[lazy]: TEXT {_literal(trigger)}")
        choices = " | ".join(_tail(index, tags.tags[index], trigger) for index in own)
        options.append(f"opening_{number} ({choices})")
    for index, tag in enumerate(tags.tags):
        rules.append(f"content_{index}: {json_rule(read_schema(json.dumps(tag.schema)))}")
    if tags.single:
        start = "tagged" if tags.required else "tagged | rest"
    else:
        start = "tagged+ rest" if tags.required else "tagged* rest"
    head = f"start: {start}\nrest: TEXT\nTEXT: /(.|\\n)*/\ntagged: {' | '.join(options)}\n"
    return head + "\n".join(rules) + "\n"


def _read(owner: Mapping[str, Any], listed: Any, schema_of: Callable[[Mapping[str, Any]], Any]) -> StructuralTags:
    triggers = owner.get("triggers")
    if not isinstance(listed, list) or not 0 < len(listed) <= _MAX_TAGS:
        raise UserError(f"the structural_tag has no tags, or more than {_MAX_TAGS}", _REMEDY)
    if not isinstance(triggers, list) or not triggers or not all(isinstance(each, str) and each for each in triggers):
        raise UserError("the structural_tag has no triggers", _REMEDY)
    tags = tuple(_tag(each, schema_of) for each in listed)
    for tag in tags:
        if not any(tag.begin.startswith(trigger) for trigger in triggers):
            raise UserError(f"the structural_tag {tag.begin[:40]!r} begins with none of its triggers", "correct it")
    used = tuple(trigger for trigger in triggers if any(tag.begin.startswith(trigger) for tag in tags))
    return StructuralTags(used, tags, bool(owner.get("at_least_one")), bool(owner.get("stop_after_first")))


def _tag(value: Any, schema_of: Callable[[Mapping[str, Any]], Any]) -> Tag:
    begin, end = (value.get("begin"), value.get("end", "")) if isinstance(value, dict) else (None, None)
    schema = schema_of(value) if isinstance(value, dict) else None
    schema = {} if schema is True else schema
    if not isinstance(begin, str) or not begin or not isinstance(end, str) or not isinstance(schema, dict):
        raise UserError("a structural_tag has no begin, end or schema", _REMEDY)
    return Tag(begin, schema, end)


def _content_schema(tag: Mapping[str, Any]) -> Any:
    content = tag.get("content")
    if not isinstance(content, dict) or content.get("type") != "json_schema":
        raise UserError("a structural_tag has content that is no json_schema", "give a json_schema")
    return content.get("json_schema")


def _tail(index: int, tag: Tag, trigger: str) -> str:
    """What follows the trigger."""
    parts = [_literal(tag.begin[len(trigger) :]), f"content_{index}", _literal(tag.end)]
    return " ".join(filter(None, parts))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
