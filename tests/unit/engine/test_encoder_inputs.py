"""Pairs of texts as a cross-encoder takes them: cut to what the model has, whatever the caller allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.embedding_models import save_tokenizer
from tokenmill.checkpoint.tokenizer_files import load_tokenizer
from tokenmill.engine.embedding.inputs import InputMaker
from tokenmill.errors import UserError


@pytest.mark.parametrize("limit", [8, 16, 64])
def test_a_pair_is_never_longer_than_the_model_takes(tmp_path: Path, limit: int) -> None:
    save_tokenizer(tmp_path, "bert", 64)
    tokenizer = load_tokenizer(tmp_path)
    inputs = InputMaker(tokenizer, None, 16)
    first, second = [5] * 4, [6] * 20
    whole, _ = tokenizer.pair(first, second)
    found = inputs.pair(first, second, limit)
    assert len(found.token_ids) == min(limit, 16)
    assert found.cut == len(whole) - len(found.token_ids)
    assert found.token_ids[found.second] == 6
    with pytest.raises(UserError, match="holds 16"):
        inputs.pair(first, second, None)
