"""The built-in calibration text: passages written for it (prose, code, lists, mathematics, ten languages), and as many
more documents as asked for, composed from word lists by a seeded generator.

Enough to calibrate on a machine without data; text like the model's real traffic calibrates better, and the card says
which was used. Knows nothing of tokens. Used by the quantizer, its gate, and the calibration of KV pages.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

_PASSAGES = Path(__file__).with_name("default_passages.txt")
_WORDS = Path(__file__).with_name("default_words.txt")


class _Chance(random.Random):
    """Chooses from the word lists, one list per line of the file: "name: word|word"."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        lines = (line.partition(": ") for line in _WORDS.read_text(encoding="utf-8").splitlines())
        self.words = {name: words.split("|") for name, _, words in lines}

    def a(self, kind: str) -> str:
        return self.choice(self.words[kind])


def default_text(num_bytes: int, seed: int = 0) -> str:
    """At least `num_bytes` of text: the passages in an order of the seed, then composed documents."""
    chance = _Chance(seed)
    passages = [part.strip() for part in _PASSAGES.read_text(encoding="utf-8").split("%%\n")]
    chance.shuffle(passages)
    documents, size = [], 0
    makers: list[Callable[[_Chance], str]] = [
        _story,
        _article,
        _sums,
        _function,
        _record,
        _dialogue,
        _table,
        _list,
    ]
    while size < num_bytes:
        # One passage in four as long as they last, so that any part of the text is a mixture.
        document = passages.pop() if passages and chance.random() < 0.25 else chance.choice(makers)(chance)
        documents.append(document)
        size += len(document.encode()) + 2
    return "\n\n".join(documents)


def _sentence(chance: _Chance, name: str) -> str:
    kind = chance.randrange(4)
    quality, thing = chance.a("qualities"), chance.a("things")
    if kind == 0:
        return f"{name} {chance.a('actions')} the {quality} {thing} {chance.a('reasons')}."
    if kind == 1:
        return f"At {chance.a('places')} there was a {thing}, {quality} and {chance.a('qualities')}."
    if kind == 2:
        return f'"Have you seen my {thing}?" asked {name}. "The {quality} one."'
    return f"For {chance.randint(2, 40)} days {name} thought of nothing but the {thing} at {chance.a('places')}."


def _story(chance: _Chance) -> str:
    names = chance.sample(chance.words["names"], 2)
    return " ".join(_sentence(chance, chance.choice(names)) for _ in range(chance.randint(5, 14)))


def _article(chance: _Chance) -> str:
    topic = chance.a("topics")
    facts = chance.sample(chance.words["facts"], chance.randint(3, 6))
    year = chance.randint(1580, 1990)
    lines = [f"What is known about {topic} {fact}." for fact in facts]
    lines.insert(1, f"In {year} a survey of {chance.a('topics')} and {topic} listed {chance.randint(12, 4000)} cases.")
    return f"== {topic.capitalize()} ==\n" + " ".join(lines)


def _sums(chance: _Chance) -> str:
    lines = []
    for _ in range(chance.randint(3, 7)):
        a, b, c = chance.randint(2, 99), chance.randint(2, 99), chance.randint(2, 9)
        name, thing = chance.a("names"), chance.a("things")
        lines.append(
            f"Question: {name} has {a} {thing}s and gets {b} more, {c} times. How many {thing}s is that?\n"
            f"Answer: {c} times {b} is {b * c}, and {a} + {b * c} = {a + b * c}."
        )
    return "\n".join(lines)


def _function(chance: _Chance) -> str:
    verb, thing = chance.a("verbs"), chance.a("things")
    limit = chance.randint(2, 512)
    return (
        f"def {verb}_{thing}s({thing}s: list[int], limit: int = {limit}) -> list[int]:\n"
        f'    """{verb.capitalize()} the {chance.a("qualities")} {thing}s, at most `limit` of them."""\n'
        f"    result = []\n"
        f"    for index, {thing} in enumerate({thing}s):\n"
        f"        if index >= limit or {thing} % {chance.randint(2, 9)} == 0:\n"
        f"            continue\n"
        f"        result.append({thing} * {chance.randint(2, 30)} + index)\n"
        f"    return result\n"
    )


def _record(chance: _Chance) -> str:
    records = [
        {
            "id": chance.randint(1000, 99999),
            "name": chance.a("names"),
            "item": f"{chance.a('qualities')} {chance.a('things')}",
            "price": round(chance.uniform(1, 400), 2),
            "sent": chance.random() < 0.5,
        }
        for _ in range(chance.randint(1, 4))
    ]
    return json.dumps(records, indent=chance.choice((None, 2)))


def _dialogue(chance: _Chance) -> str:
    topic, lines = chance.a("topics"), []
    for _ in range(chance.randint(2, 4)):
        lines.append(f"User: Tell me something about {topic} and {chance.a('things')}s.")
        lines.append(f"Assistant: {topic.capitalize()} {chance.a('facts')}. {_sentence(chance, chance.a('names'))}")
    return "\n".join(lines)


def _table(chance: _Chance) -> str:
    rows = ["name,place,count,share"]
    for _ in range(chance.randint(4, 10)):
        place = chance.a("places").replace(",", "")
        rows.append(f"{chance.a('names')},{place},{chance.randint(0, 900)},{chance.random():.3f}")
    return "\n".join(rows)


def _list(chance: _Chance) -> str:
    title = f"How to {chance.a('verbs')} a {chance.a('qualities')} {chance.a('things')}"
    steps = [
        f"{number}. Take the {chance.a('qualities')} {chance.a('things')} to {chance.a('places')}."
        for number in range(1, chance.randint(4, 9))
    ]
    return "\n".join([title, *steps])
