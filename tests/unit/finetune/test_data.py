"""Packing: every token of every document once, none beside a stranger, and only what is to be learned is a target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.checkpoint.tokenizer_files import load_tokenizer
from tokenmill.errors import UserError
from tokenmill.finetune.data import IGNORED, Document, hold_out, pack, read_documents, read_rows

LENGTH = 12


@pytest.fixture(scope="module")
def tokenizer(model_path: Callable[[str], Path]) -> Tokenizer:
    return load_tokenizer(model_path("stories15m"))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(2, LENGTH), st.integers(1, 5)), min_size=1, max_size=20))
def test_documents_are_whole_and_apart(sizes: list[tuple[int, int]]) -> None:
    documents = [
        Document([1000 * number + place for place in range(size)], min(first, size - 1))
        for number, (size, first) in enumerate(sizes)
    ]
    rows = pack(documents, LENGTH)
    seen = []
    for ids, targets, owners, positions in zip(rows.ids, rows.targets, rows.documents, rows.positions, strict=True):
        for owner in owners.unique().tolist():
            place = owners == owner
            if owner < 0:
                assert bool((targets[place] == IGNORED).all())
                continue
            tokens = ids[place].tolist()
            document = documents[tokens[0] // 1000]
            assert tokens == document.token_ids
            assert positions[place].tolist() == list(range(len(tokens)))
            expected = [IGNORED] * (document.first - 1) + tokens[document.first :] + [IGNORED]
            assert targets[place].tolist() == expected
            seen.append(tokens[0] // 1000)
    assert sorted(seen) == list(range(len(documents)))
    assert len(rows) <= len(documents)


def test_short_documents_share_rows() -> None:
    assert len(pack([Document([5] * 3) for _ in range(8)], LENGTH)) == 2


def test_a_text_is_one_stream(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = tmp_path / "text.txt"
    text.write_text("One day a boy saw a boat. " * 30)
    rows = read_rows(text, tokenizer, None, LENGTH)
    assert rows.ids[:, 0].unique().tolist() == [tokenizer.bos_id]
    flat = tokenizer.encode(text.read_text())
    assert rows.ids[1, 1:].tolist() == flat[LENGTH + 1 : 2 * LENGTH]
    assert rows.num_targets == len(rows) * (LENGTH - 1)


def test_of_a_prompt_only_the_completion_is_learned(tmp_path: Path, tokenizer: Tokenizer) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "Say it: ", "completion": "the boat"}) + "\n")
    (document,) = read_documents(data, tokenizer, None, 64)
    rows = pack([document], 64)
    learned = rows.targets[rows.targets != IGNORED].tolist()
    assert learned == [*tokenizer.encode("the boat", add_special_tokens=False), tokenizer.eos_ids[0]]


def test_long_documents_are_cut(tmp_path: Path, tokenizer: Tokenizer) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"text": "a boat and a boy " * 20}) + "\n" + json.dumps({"text": "the end"}) + "\n")
    documents = read_documents(data, tokenizer, None, LENGTH)
    assert max(len(each.token_ids) for each in documents) == LENGTH
    whole = [token for each in documents for token in each.token_ids]
    assert whole[-1] == tokenizer.eos_ids[0]


def test_what_is_held_out_is_not_trained_on() -> None:
    rows = pack([Document([number] * LENGTH) for number in range(30)], LENGTH)
    training, held = hold_out(rows)
    assert (len(training), len(held)) == (27, 3)
    assert not torch.isin(training.ids, held.ids).any()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 of the data is not JSON"),
        ('{"question": "?"}', "line 1 of the data has no text"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no chat template"),
        ("", "no text to learn from"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, tokenizer: Tokenizer, line: str, message: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(line + "\n")
    with pytest.raises(UserError, match=message):
        read_rows(data, tokenizer, None, LENGTH)


def test_too_little_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = tmp_path / "text.txt"
    text.write_text("One day.")
    with pytest.raises(UserError, match="fewer than a row of 512"):
        read_rows(text, tokenizer, None, 512)
    with pytest.raises(UserError, match="2 rows, of which 2"):
        hold_out(pack([Document([1] * LENGTH) for _ in range(2)], LENGTH), 2)
