"""Checks of what an answer looks like: bullets, highlights, sections, JSON, a title, how it begins and ends."""

from __future__ import annotations

import json
import re

_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def bullets(answer: str, num_bullets: int) -> bool:
    """Exactly `num_bullets` lines begin with one asterisk or a hyphen."""
    lines = re.findall(r"^\s*\*[^*].*$", answer, re.MULTILINE) + re.findall(r"^\s*-.*$", answer, re.MULTILINE)
    return len(lines) == num_bullets


def one_of_three(answer: str) -> bool:
    return any(text in answer for text in _ANSWERS)


def highlights(answer: str, num_highlights: int) -> bool:
    """*parts* and **parts** with something between the asterisks."""
    single = re.findall(r"\*([^\n*]*)\*", answer)
    double = re.findall(r"\*\*([^\n*]*)\*\*", answer)
    return sum(bool(part.strip()) for part in single + double) >= num_highlights


def sections(answer: str, section_spliter: str, num_sections: int) -> bool:
    """At least `num_sections` headings such as "SECTION 1": the splitter and a number."""
    return len(re.findall(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", answer)) >= num_sections


def is_json(answer: str) -> bool:
    """The whole answer, without a code fence around it, is JSON."""
    text = re.sub(r"^```(?:json)?\s*|\s*```$", "", answer.strip(), flags=re.IGNORECASE)
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def has_title(answer: str) -> bool:
    """<<A title>>"""
    return any(title.strip("<> ") for title in re.findall(r"<<[^\n]+>>", answer))


def two_responses(answer: str) -> bool:
    """Two different answers with six asterisks between them."""
    parts = answer.split("******")
    if any(not part.strip() for part in parts[1:-1]):
        return False
    responses = [part.strip() for part in parts if part.strip()]
    return len(responses) == 2 and responses[0] != responses[1]


def repeats_prompt(answer: str, prompt_to_repeat: str) -> bool:
    return answer.strip().lower().startswith(prompt_to_repeat.strip().lower())


def ends_with(answer: str, end_phrase: str) -> bool:
    return answer.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def is_quoted(answer: str) -> bool:
    text = answer.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'
