"""Checks of what an answer says: keywords, letters, language, case, commas, placeholders, a postscript."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenmill.evaluate.instructions.language import detect_language
from tokenmill.evaluate.instructions.relation import holds

_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")


def has_keywords(answer: str, keywords: Sequence[str]) -> bool:
    """Each occurs, in any case, also inside a longer word."""
    return all(keyword.lower() in answer.lower() for keyword in keywords)


def keyword_frequency(answer: str, keyword: str, frequency: int, relation: str) -> bool:
    return holds(answer.lower().count(keyword.strip().lower()), relation, frequency)


def lacks_words(answer: str, forbidden_words: Sequence[str]) -> bool:
    """None of them occurs as a word of its own."""
    return not any(re.search(rf"\b{re.escape(word)}\b", answer, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(answer: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return holds(answer.lower().count(letter.lower()), let_relation, let_frequency)


def in_language(answer: str, language: str) -> bool:
    """A text too short or too mixed to tell is given the benefit of the doubt, as in the benchmark."""
    return detect_language(answer) in (language, None)


def capital_words(answer: str, capital_frequency: int, capital_relation: str) -> bool:
    return holds(sum(word.isupper() for word in _WORD.findall(answer)), capital_relation, capital_frequency)


def all_capitals(answer: str) -> bool:
    return answer.isupper() and in_language(answer.lower(), "en")


def all_lowercase(answer: str) -> bool:
    return answer.islower() and in_language(answer, "en")


def lacks_commas(answer: str) -> bool:
    return "," not in answer


def placeholders(answer: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\n]*?\]", answer)) >= num_placeholders


def has_postscript(answer: str, postscript_marker: str) -> bool:
    """The marker, with or without spaces between its letters: "P.S.", "p. s.", "P.P.S"."""
    letters = [re.escape(letter) for letter in postscript_marker.lower() if not letter.isspace()]
    return re.search(r"\s?".join(letters), answer.lower()) is not None
