"""Shares of adapters in a benchmark: what is written is what is sent, spread over the run."""

from __future__ import annotations

from collections import Counter

import pytest

from tokenmill.bench.lora_mix import assign, parse_mix
from tokenmill.bench.serve_job import ServeJob
from tokenmill.errors import UserError


def test_names_share_evenly_and_the_rest_is_the_bases() -> None:
    assert parse_mix("", ["a", "b"]) == {"a": 0.5, "b": 0.5}
    assert parse_mix("", []) == {}
    assert parse_mix("a,b") == {"a": 0.5, "b": 0.5}
    assert parse_mix("a=0.5, b=0.25", ["a", "b"]) == {"a": 0.5, "b": 0.25}


def test_every_stretch_of_the_run_has_the_mix() -> None:
    order = assign({"a": 0.5, "b": 0.25}, 16)
    assert Counter(order) == {"a": 8, "b": 4, None: 4}
    for begin in range(0, 16, 4):
        assert Counter(order[begin : begin + 4]) == {"a": 2, "b": 1, None: 1}
    assert assign({}, 3) == [None] * 3


@pytest.mark.parametrize("text", ["a=2", "a=x", "a=0.7,b=0.7", "a=0.1,a=0.2", "=0.5", "c=0.5", "a=nan"])
def test_shares_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_mix(text, ["a", "b"])


def test_a_bad_mix_ends_a_job_before_it_begins() -> None:
    with pytest.raises(UserError, match="more than 1"):
        ServeJob(lora_mix="a=0.9,b=0.9")
