"""Long contexts: lengths within the model, passkeys at their depths, and what their checks refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.checkpoint.tokenizer_files import load_tokenizer
from tokenmill.optimize.long_context import (
    DEPTHS,
    divergence_check,
    long_window,
    passkeys,
    retrieval_check,
    usable_lengths,
)


@pytest.fixture(scope="module")
def tokenizer(vocabulary: Callable[[str], Path]) -> Tokenizer:
    return load_tokenizer(vocabulary("gpt-2"))


def test_lengths_stay_within_the_model_and_beyond_the_short_windows() -> None:
    assert usable_lengths((4096, 9000), 512, 8192) == (4096, 8192)
    assert usable_lengths((4096, 9000), 512, 2048) == (2048,)
    assert usable_lengths((4096, 300), 512, 512) == ()


def test_a_window_of_any_length_from_a_short_text(tokenizer: Tokenizer) -> None:
    window = long_window("A short text about nothing. ", tokenizer, 1000)
    assert len(window.token_ids) == 1000
    assert window.num_scored == 250
    assert long_window("A short text. ", tokenizer, 8192).num_scored == 512


def test_a_passkey_lies_at_its_depth_and_is_asked_for_at_the_end(tokenizer: Tokenizer) -> None:
    items = passkeys("Grass is green and the sky is blue. ", tokenizer, 400)
    assert len(items) == len(DEPTHS)
    for item, depth in zip(items, DEPTHS, strict=True):
        assert len(item.context) + max(map(len, item.answers)) == 400
        key = tokenizer.decode(item.answers[0]).strip()
        before, _, after = tokenizer.decode(item.context).partition(f"The pass key is {key}")
        assert len(before) / (len(before) + len(after)) == pytest.approx(depth, abs=0.12)
        assert after.endswith("The pass key is")
        others = [tokenizer.decode(answer).strip() for answer in item.answers[1:]]
        assert len({key, *others}) == 4
        assert not any(other in before + after for other in others)
    assert passkeys("Grass is green. ", tokenizer, 400)[0].answers == passkeys("Sky. ", tokenizer, 400)[0].answers


def test_a_key_that_is_lost_is_refused() -> None:
    check = retrieval_check(4096, [0.98, 0.3, 0.97], [0.99, 0.97, 0.98], [0.99, 0.96, 0.98])
    assert check.limit == pytest.approx(0.83)
    assert "a passkey in a context of 4096 tokens" in check.refusal
    assert not retrieval_check(4096, [0.98, 0.93, 0.97], [0.99, 0.97, 0.98], [0.99, 0.96, 0.98]).refusal


def test_a_baseline_that_varies_allows_more_and_one_that_cannot_is_skipped() -> None:
    assert not retrieval_check(4096, [0.9, 0.5, 0.9], [0.9, 0.9, 0.9], [0.9, 0.4, 0.9]).refusal
    skipped = retrieval_check(4096, [0.0, 0.0, 0.0], [0.2, 0.3, 0.25], [0.2, 0.3, 0.25])
    assert not skipped.refusal
    assert skipped.note == "skipped: the baseline itself gives the right key 25% among 4"


def test_the_joint_limit_holds_at_every_length() -> None:
    assert not divergence_check(4096, 0.019, 0.02).refusal
    assert "at a context of 4096 tokens is more than 0.02 nats" in divergence_check(4096, 0.021, 0.02).refusal
    assert divergence_check(4096, float("nan"), 0.02).refusal
