"""Patterns of module names: the same answers as Python's engine, and in bounded time where that one takes for ever."""

from __future__ import annotations

import contextlib
import random
import re
import warnings

import pytest

from tokenmill.checkpoint.adapters import patterns
from tokenmill.checkpoint.adapters.patterns import PatternError, matches_tail

_NAMES = [
    "",
    "a",
    "model.layers.0.self_attn.q_proj",
    "model.layers.12.self_attn.q_proj",
    "model.layers.1.mlp.down_proj",
    "transformer.h.3.attn.c_attn",
    "lm_head",
    "lm_head\n",
    "a.b\nc.q_proj",
]
# As PEFT's documentation and users write them.
_WRITTEN = [
    "q_proj",
    "self_attn.q_proj",
    r"model\.layers\.0\.self_attn\.q_proj",
    "^model.layers.0.self_attn.q_proj",
    r".*\.(0|1|12)\.self_attn\.(q|k)_proj",
    r"layers\.[0-9]+\.mlp\.down_proj",
    r"layers\.\d{1,2}\.self_attn\.\w+?_proj$",
    r"h\.3\.attn.*",
    "(?:q|v)_proj",
    "lm_head",
    "lm_head$",
    "",
    "q_proj|lm_head",
    r"[^.]+",
    r"[]a-z_^-]*",
    "x{,2}lm_head",
    "lm_hea{",
    "{}",
]
_PIECES = [
    "a",
    ".",
    r"\.",
    "[a_]",
    "[^.]",
    r"\w",
    "(",
    "(?:",
    ")",
    "|",
    "*",
    "+",
    "?",
    "{2}",
    "{0,2}",
    "^",
    "$",
    "_proj",
]


def _by_python(pattern: str, name: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


@pytest.mark.parametrize("pattern", _WRITTEN)
def test_what_people_write_matches_as_in_peft(pattern: str) -> None:
    assert [matches_tail(pattern, name) for name in _NAMES] == [_by_python(pattern, name) for name in _NAMES]


def test_random_patterns_match_as_in_python() -> None:
    rng, num_read = random.Random(3), 0
    for _ in range(4000):
        pattern = "".join(rng.choices(_PIECES, k=rng.randint(1, 7)))
        name = "".join(rng.choices("aa_.b", k=rng.randint(0, 8)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                re.compile(pattern)  # with what PEFT puts around it, `)(` would be one
                expected: bool | None = _by_python(pattern, name)
            except re.error:
                expected = None
        try:
            found: bool | None = matches_tail(pattern, name)
        except PatternError as error:
            found = expected if "not supported" in str(error) else None
        else:
            num_read += 1
        assert found == expected, (pattern, name)
    assert num_read > 1000


@pytest.mark.parametrize(
    "pattern", ["(a*)*b", "(a|a)*b", "(a|aa)+b", "((((a+)+)+)+)+b", "(.*)*(.*)*(.*)*b", "(a?){60}a{60}"]
)
def test_patterns_that_would_hang_end(pattern: str) -> None:
    with contextlib.suppress(PatternError):  # it takes too long
        assert not matches_tail(pattern, "a" * 250)


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        ")",
        "[",
        "a**",
        "*",
        r"\1",
        r"\b",
        "(?=a)",
        "(?P<n>a)",
        "(?i)a",
        "a++",
        "a{2,1}",
        "a{999}",
        20 * "(" + 20 * ")",
    ],
)
def test_what_is_not_read_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        matches_tail(pattern, "a")
    with pytest.raises(PatternError, match="characters"):
        matches_tail("a" * (patterns.MAX_PATTERN + 1), "a")
