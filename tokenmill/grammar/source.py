"""A StructuredSpec in the grammar library's own language. Every rejection is a UserError that names what is not
supported.

A schema keyword that cannot be enforced is rejected, never dropped; references to other documents are not followed.
Knows no tokens and no models; called by the compiler only.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenmill.errors import UserError
from tokenmill.grammar.schemas import JSON_OPTIONS, read_schema
from tokenmill.grammar.structural_tags import read_tags, tags_grammar
from tokenmill.types import StructuredSpec

_MAX_CHARS = {
    "json_schema": 1 << 17,
    "regex": 1 << 14,
    "choice": 1 << 16,
    "grammar": 1 << 16,
    "structural_tag": 1 << 17,
}
_RULE = re.compile(r"[ \t]*[\w-]+[ \t]*::=")  # of GBNF, at the start of a line
_MAX_MESSAGE = 300
_REMEDY = {
    "json_schema": "leave that part out of the schema, or check the answer yourself",
    "json_object": "report this",
    "regex": "write it without look-around, back-references and word boundaries",
    "choice": "shorten the list",
    "structural_tag": "leave that part out of the schemas, or check the answer yourself",
    "grammar": "give a Lark grammar with a rule 'start', or GBNF with a rule 'root'",
}


def grammar_text(spec: StructuredSpec) -> str:
    """The grammar as the library reads it. Raises UserError where the text itself is broken."""
    from llguidance import LLMatcher

    match spec.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_options())
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(json.dumps(read_schema(spec.text)), overrides=_options())
        case "regex":
            return LLMatcher.grammar_from_regex(unanchored(spec.text))
        case "choice":
            return LLMatcher.grammar_from_regex("|".join(map(_escaped, dict.fromkeys(spec.choices))))
        case "structural_tag":
            return LLMatcher.grammar_from_lark(tags_grammar(read_tags(spec.text)))
        case _:
            return LLMatcher.grammar_from_lark(_lark(spec.text))


def check_limits(spec: StructuredSpec) -> None:
    """Raises UserError for a spec that is too large to be compiled. Cheap: the server calls it on its event loop."""
    size = len(spec.text) + sum(map(len, spec.choices))
    limit = _MAX_CHARS.get(spec.kind, 0) or size
    if size > limit:
        raise UserError(f"the {spec.kind} has {size} characters", f"give at most {limit}")


def refusal(spec: StructuredSpec, reason: str) -> UserError:
    """The library's message on one line, with a remedy."""
    words = " ".join(reason.replace("<non-verbose/>", "").split())
    words = re.sub(r"^at \d+\(\d+\): ", "", re.sub(r" \d+ \| .*", "", words))  # positions in the library's own text
    if "coerce_one_of" in words:
        words = "oneOf is supported only if its branches cannot both match; use anyOf, or make them disjoint"
    if spec.kind == "regex":
        words = words.rpartition("error: ")[2]
    if words.startswith("NoExtension"):
        words = "it allows no output at all"
    if len(words) > _MAX_MESSAGE:
        words = words[:_MAX_MESSAGE] + "..."
    return UserError(f"the {spec.kind} cannot be used: {words}", _REMEDY[spec.kind])


def _options() -> Any:
    return dict(JSON_OPTIONS)


def unanchored(regex: str) -> str:
    """The entire output must match anyway, so ^ at the start and $ at the end are redundant."""
    body = regex.removeprefix("^")
    if body.endswith("$") and (len(body) - len(body[:-1].rstrip("\\"))) % 2 == 1:
        body = body[:-1]
    return body if body == regex or "|" not in body else f"(?:{body})"


def _escaped(text: str) -> str:
    return re.sub(r"[^\w]", lambda match: f"\\x{{{ord(match[0]):x}}}", text)


def is_gbnf(text: str) -> bool:
    """Whether any line starts a rule as GBNF writes it. Each line is scanned once: the text may be long and hostile."""
    return any(map(_RULE.match, text.split("\n")))


def _lark(text: str) -> str:
    if not is_gbnf(text):
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the converter raises all kinds
        raise UserError(
            f"the grammar is not GBNF: {' '.join(str(error).split())[:_MAX_MESSAGE]}", "correct it"
        ) from None
