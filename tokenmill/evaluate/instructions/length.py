"""Checks of how long an answer is: words, sentences, paragraphs."""

from __future__ import annotations

import re

from tokenmill.evaluate.instructions.relation import holds

_WORD = re.compile(r"\w+")
_TITLE = re.compile(r"\b(?i:mr|mrs|ms|dr|prof|sr|jr|vs|e\.g|i\.e)$|(?:^|[\s.])[A-HJ-Z]$")  # or an initial, but for "I"
_SHORTENED = re.compile(r"\b(?i:etc|u\.s|a\.m|p\.m|approx|inc)$")  # may also end a sentence
_SENTENCE_END = re.compile(r"[.!?。！？।]+[\"'”’)\]*_]*(?=\s|$)")


def words(answer: str, num_words: int, relation: str) -> bool:
    return holds(len(_WORD.findall(answer)), relation, num_words)


def sentences(answer: str, num_sentences: int, relation: str) -> bool:
    return holds(count_sentences(answer), relation, num_sentences)


def count_sentences(text: str) -> int:
    """Runs of text that end in a full stop, an exclamation or a question mark, or at a paragraph's end."""
    count = 0
    for paragraph in re.split(r"\n\s*\n", text):
        rest = 0
        for end in _SENTENCE_END.finditer(paragraph):
            if _WORD.search(paragraph, rest, end.start()) and not _abbreviates(paragraph, rest, end.start()):
                count += 1
                rest = end.end()
        count += _WORD.search(paragraph, rest) is not None
    return count


def _abbreviates(text: str, begin: int, stop: int) -> bool:
    """Whether the full stop at `stop` belongs to a title, an initial, a shortened word or the number of a list."""
    if text[stop] != ".":
        return False
    before, after = text[begin:stop].lstrip(), text[stop + 1 :].lstrip()
    if _SHORTENED.search(before):
        return after[:1].islower()
    return bool(_TITLE.search(before)) or before.isdecimal()


def paragraphs(answer: str, num_paragraphs: int) -> bool:
    """Paragraphs separated by lines of three asterisks; none may be empty."""
    parts = re.split(r"\s?\*\*\*\s?", answer)
    inner = parts[1:-1]
    if any(not part.strip() for part in inner):
        return False
    return sum(bool(part.strip()) for part in parts) == num_paragraphs


def paragraph_begins(answer: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """`num_paragraphs` paragraphs, separated by empty lines; the nth begins with `first_word`."""
    parts = answer.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if count != num_paragraphs or nth_paragraph > count or not parts[nth_paragraph - 1].strip():
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'\"“‘")
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()
