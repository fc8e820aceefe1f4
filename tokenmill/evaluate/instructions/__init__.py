"""Instructions that a program can check, by the ids that IFEval gives them. Register here and nowhere else.

A check is a function of the answer and of the instruction's own arguments; `follows` calls it. An empty answer follows
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.registry import Registry

_CONTENT = "tokenmill.evaluate.instructions.content"
_FORM = "tokenmill.evaluate.instructions.form"
_LENGTH = "tokenmill.evaluate.instructions.length"

INSTRUCTIONS = Registry(
    "instruction",
    {
        "keywords:existence": f"{_CONTENT}:has_keywords",
        "keywords:frequency": f"{_CONTENT}:keyword_frequency",
        "keywords:forbidden_words": f"{_CONTENT}:lacks_words",
        "keywords:letter_frequency": f"{_CONTENT}:letter_frequency",
        "language:response_language": f"{_CONTENT}:in_language",
        "change_case:capital_word_frequency": f"{_CONTENT}:capital_words",
        "change_case:english_capital": f"{_CONTENT}:all_capitals",
        "change_case:english_lowercase": f"{_CONTENT}:all_lowercase",
        "punctuation:no_comma": f"{_CONTENT}:lacks_commas",
        "detectable_content:number_placeholders": f"{_CONTENT}:placeholders",
        "detectable_content:postscript": f"{_CONTENT}:has_postscript",
        "length_constraints:number_sentences": f"{_LENGTH}:sentences",
        "length_constraints:number_paragraphs": f"{_LENGTH}:paragraphs",
        "length_constraints:number_words": f"{_LENGTH}:words",
        "length_constraints:nth_paragraph_first_word": f"{_LENGTH}:paragraph_begins",
        "detectable_format:number_bullet_lists": f"{_FORM}:bullets",
        "detectable_format:constrained_response": f"{_FORM}:one_of_three",
        "detectable_format:number_highlighted_sections": f"{_FORM}:highlights",
        "detectable_format:multiple_sections": f"{_FORM}:sections",
        "detectable_format:json_format": f"{_FORM}:is_json",
        "detectable_format:title": f"{_FORM}:has_title",
        "combination:two_responses": f"{_FORM}:two_responses",
        "combination:repeat_prompt": f"{_FORM}:repeats_prompt",
        "startend:end_checker": f"{_FORM}:ends_with",
        "startend:quotation": f"{_FORM}:is_quoted",
    },
)


def follows(instruction: str, answer: str, arguments: Mapping[str, Any]) -> bool:
    """Arguments that are None are dropped: some copies of the benchmark list every name for every item."""
    values = {name: value for name, value in arguments.items() if value is not None}
    return bool(answer.strip()) and bool(INSTRUCTIONS.get(instruction)(answer, **values))
