"""Reasoning in one chat request: how the model marks it, and what that means for the output.

Joins the style of the model (`ReasoningStyle`, one per server) with the prompt of a request, whose end tells whether
the answer begins inside the reasoning. A constraint on the output holds for what follows the reasoning. Knows no HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.checkpoint.chat_template import ChatTemplate
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.errors import UserError
from tokenmill.serve.reasoning import ALIASES, REASONING_PARSERS
from tokenmill.serve.reasoning.base import ReasoningParser, TaggedReasoning
from tokenmill.types import ReasoningBudget, SamplingParams, StructuredSpec

AUTOMATIC, NONE = "auto", "none"
_MAX_END = 64  # characters of the prompt's end that a parser looks at
_THOUGHT = "thought_before_the_answer"  # the rule of the reasoning in a grammar
_OWN_START = re.compile(r"start: (answer \| calls|calls)\n")  # of grammars that are made here, for tools
# Variables by which chat templates switch reasoning on and off.
_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    parser: type[ReasoningParser] | None  # None: the model does not reason
    markers_hidden: bool  # what delimits it are control tokens, which plain text does not show
    start_id: int | None  # of the token that begins the reasoning, if it is one token
    end_id: int | None  # of the token that ends it
    reason: str  # why this parser

    @classmethod
    def choose(cls, template: ChatTemplate | None, tokenizer: Tokenizer, name: str = AUTOMATIC) -> ReasoningStyle:
        source = template.source if template is not None else ""
        if name == NONE:
            return cls(None, False, None, None, "as stated")
        if name != AUTOMATIC:
            known = name if name in REASONING_PARSERS else ALIASES.get(name, name)
            parser, reason = REASONING_PARSERS.get(known), "as stated"
        else:
            matching = [each for each in REASONING_PARSERS if REASONING_PARSERS.get(each).writes(source)]
            if not matching:
                return cls(None, False, None, None, "the chat template has no reasoning")
            parser, reason = REASONING_PARSERS.get(matching[0]), "from the chat template"

        def token_of(text: str) -> int | None:
            ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
            return ids[0] if len(ids) == 1 else None

        hidden = any(token_of(marker) in tokenizer.special_ids for marker in parser.markers)
        tagged = issubclass(parser, TaggedReasoning)
        start_id = token_of(parser.openings[0]) if tagged else None
        return cls(parser, hidden, start_id, token_of(parser.end_marker) if parser.end_marker else None, reason)

    def reader(self, prompt: str, structured: StructuredSpec | None) -> ReasoningParser | None:
        """The parser of one answer; None if there is no reasoning in it."""
        if self.parser is None or not _has_room(structured):
            return None
        return self.parser(prompt[-_MAX_END:])

    @property
    def can_be_limited(self) -> bool:
        """Whether the reasoning can be ended by a single token."""
        tagged = self.parser is not None and issubclass(self.parser, TaggedReasoning)
        return tagged and self.start_id is not None and self.end_id is not None

    def apply(self, params: SamplingParams, prompt: str, budget: int | None = None) -> SamplingParams:
        """Markers stay visible; a constraint begins after the reasoning, where a grammar can say that. `budget`: the
        most tokens that it may have. Raises UserError."""
        if budget is not None:
            params = replace(params, reasoning=self._budget(prompt[-_MAX_END:], budget))
        if self.parser is None:
            return params
        if self.markers_hidden:
            return replace(params, skip_special_tokens=False)
        if params.structured is None or not issubclass(self.parser, TaggedReasoning) or not self.parser.closing:
            return params
        return replace(params, structured=_after_reasoning(params.structured, self.parser, prompt[-_MAX_END:]))

    def _budget(self, prompt: str, max_tokens: int) -> ReasoningBudget | None:
        if not self.can_be_limited:
            raise UserError("thinking_token_budget is not supported for this model", "leave it out, or use max_tokens")
        assert self.parser is not None
        assert issubclass(self.parser, TaggedReasoning)
        assert self.end_id is not None
        phase = self.parser.phase(prompt)
        if phase == "closed":
            return None
        return ReasoningBudget(max_tokens, self.end_id, self.start_id if phase == "open" else None)

    def num_tokens(self, token_ids: Sequence[int]) -> int | None:
        """Tokens of an answer that were spent on its reasoning; None if that cannot be told."""
        if self.end_id is None:
            return None
        return token_ids.index(self.end_id) + 1 if self.end_id in token_ids else len(token_ids)


def switch_variables(template: str, enabled: bool) -> Mapping[str, Any]:
    """Template variables that switch the reasoning on or off; empty if the template has none."""
    return {name: enabled for name in _SWITCHES if re.search(rf"\b{name}\b", template)}


def _has_room(structured: StructuredSpec | None) -> bool:
    """Whether an output of this kind may begin with reasoning. Other constraints hold from the first token on."""
    if structured is None or structured.kind == "structural_tag":
        return True
    return structured.kind == "grammar" and _THOUGHT in structured.text


def _after_reasoning(spec: StructuredSpec, parser: type[TaggedReasoning], prompt: str) -> StructuredSpec:
    from tokenmill.grammar.schemas import json_rule, read_schema

    phase = parser.phase(prompt)
    if phase == "closed":
        return spec
    match spec.kind:
        case "json_object":
            rules = f"final: {json_rule({'type': 'object'})}\n"
        case "json_schema":
            rules = f"final: {json_rule(read_schema(spec.text))}\n"
        case "grammar" if _OWN_START.match(spec.text):
            rules = "final" + spec.text.removeprefix("start")
        case _:
            return spec
    opening = f'"{parser.openings[0]}"'
    if phase == "inside":
        start = f"{_THOUGHT} BLANKS? final"
    elif parser.implied:
        start = f"{opening}? {_THOUGHT} BLANKS? final"
    else:
        start = f"final | {opening} {_THOUGHT} BLANKS? final"
    thought = f'{_THOUGHT}[suffix="{parser.closing}"]: /[\\s\\S]*/\nBLANKS: /[ \\n]{{1,4}}/\n'
    return StructuredSpec("grammar", f"start: {start}\n{thought}{rules}")
