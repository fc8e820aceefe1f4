"""States of regular expressions and choices: they accept what `re` accepts, are few, and refuse what is not certain."""

from __future__ import annotations

import random
import re

import pytest

from tests.unit.grammar.regexes import random_regex
from tokenmill.grammar import regular
from tokenmill.grammar.states import ChoiceStates, RegexStates, State, states_of
from tokenmill.types import StructuredSpec

_LETTERS = 'abc0-, \n"/'


def _accepts(states: RegexStates, text: str) -> bool:
    state = states.after(states.start, text.encode())
    return state is not None and states._regular.nodes[state].nullable


def _reachable(states: RegexStates, alphabet: str) -> set[State]:
    seen, left = {states.start}, [states.start]
    while left:
        state = left.pop()
        for letter in alphabet:
            after = states.after(state, letter.encode())
            if after is not None and after not in seen:
                seen.add(after)
                left.append(after)
    return seen


def test_texts_are_accepted_as_by_python() -> None:
    choice = random.Random(0)
    num_accepted = 0
    for _ in range(400):
        text = random_regex(choice)
        states, pattern = RegexStates(text), re.compile(text, re.ASCII)
        for _ in range(40):
            sample = "".join(choice.choices(_LETTERS, k=choice.randint(0, 6)))
            matches = pattern.fullmatch(sample) is not None
            assert _accepts(states, sample) == matches, (text, sample)
            num_accepted += matches
    assert num_accepted > 500


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("([a-z ]{1,8},)*", 9),
        ("[a-z]{1,8}[a-z]{1,8}", 17),
        ("(a|b|ab)*c", 4),
        ("((((a|b)*c?)*d?)*e?)*", 4),
        ("[a-z]{1,100000}", 100_001),
        ("(yes|no|maybe)(, (yes|no|maybe))*", 22),
    ],
)
def test_equal_rests_are_few_states(text: str, most: int) -> None:
    states = RegexStates(text)
    if most < 1000:
        assert len(_reachable(states, "abcdemnoy, s")) <= most
    else:  # a count is a number, not so many nodes
        assert len(states._regular.nodes) < 100


@pytest.mark.parametrize(
    "text",
    [
        "(?i)a",
        "(?P<stop>a)b",
        "(?<x>a)",
        "(?=a)b",
        "a^b",
        "a$b",
        r"\ba",
        r"\Aa",
        r"\p{L}",
        r"\<a",
        "[[:alpha:]]",
        "[a&&b]",
        "[a--b]",
        r"[\d-z]",
        r"[^\s\S]",
        r"\x{d800}",
        "a{,3}",
        "a{3,1}",
        "*a",
        "a)",
        "(a",
        "[a",
        "[z-a]",
        "a\\",
        "(" * 200 + "a" + ")" * 200,
        "((ab|c){1,3}x){1,4}" * 3000,
    ],
)
def test_what_is_not_certain_has_no_states(text: str) -> None:
    assert states_of(StructuredSpec("regex", text)) is None


def test_other_grammars_have_no_states() -> None:
    assert states_of(StructuredSpec("json_schema", "{}")) is None
    assert states_of(StructuredSpec("grammar", 'start: "a"')) is None


def test_characters_beyond_ascii_are_followed_where_all_of_them_are_meant() -> None:
    states = RegexStates('"[^"]*"')
    assert _accepts(states, '"日本é𝄞"')
    assert states.after(states.start, b'"\xed\xa0') is None  # no UTF-8
    only_ascii = RegexStates(r"\w+")
    assert _accepts(only_ascii, "ab_9")
    assert only_ascii.after(only_ascii.start, "aé".encode()) is None  # not known whether it is one
    assert _accepts(RegexStates("日+"), "日日")


def test_a_language_that_grows_is_left_where_its_limit_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular, "_MAX_WORK", 3000)
    states = RegexStates("(a|b)*a(a|b){30}")
    state: State | None = states.start
    choice, num_known = random.Random(0), 0
    while state is not None:
        state = states.after(state, choice.choice([b"a", b"b"]))
        num_known += state is not None
    assert num_known > 3
    assert len(states._regular.nodes) < 3000
    again = states.after(states.start, b"a")  # what is known stays
    assert again is None or states.after(states.start, b"a") == again


def test_finding_out_what_is_forced_has_a_limit() -> None:
    states = RegexStates("a?b?" * 400 + "z")
    after = states.after(states.start, b"a")
    assert after is not None
    before = states._regular._work_left
    states.may_be_forced(after)
    assert states._regular._work_left < before


def test_choices_are_what_begins_with_the_output() -> None:
    states = ChoiceStates(("maybe not", "maybe", "no", "nöo"))
    assert states.after(states.start, b"x") is None
    assert states.after(states.start, b"no!") is None
    maybe = states.after(states.start, b"may")
    assert maybe is not None
    assert states.after(states.start, b"m") != maybe
    assert states.may_be_forced(maybe)
    end = states.after(maybe, b"be")
    assert end is not None
    assert not states.may_be_forced(end)  # it may end here
    assert states.after(end, b" not") is not None
    half = states.after(states.start, "nö".encode()[:2])
    assert half is not None
    assert states.may_be_forced(half)


@pytest.mark.parametrize(
    ("text", "written", "forced"),
    [
        ("abc", "", True),
        ("abc", "ab", False),  # one byte: it can be split in one way only
        ("a[bc]d", "a", False),
        ("(ab)?", "", False),
        ("(ab)*c", "a", False),
        ("(abc)*", "a", True),
        ("日", "", True),
        ("[日é]", "", True),  # not known: as if it were
    ],
)
def test_forced_text_is_known(text: str, written: str, forced: bool) -> None:
    states = RegexStates(text)
    state = states.after(states.start, written.encode())
    assert state is not None
    assert states.may_be_forced(state) is forced
