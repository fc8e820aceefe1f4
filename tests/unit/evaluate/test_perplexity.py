"""The protocol of perplexity: chunks, BOS, which half is scored, and the error bar."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tokenmill.engine.outputs import Logprob, RequestMetrics, RequestOutput
from tokenmill.errors import UserError
from tokenmill.evaluate.perplexity import PerplexityJob, cut_chunks, read_text, scored_losses, summarize


def test_chunks_are_consecutive_and_a_short_rest_is_left() -> None:
    assert cut_chunks(list(range(11)), 4, None) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cut_chunks(list(range(11)), 4, None, max_chunks=1) == [[0, 1, 2, 3]]


def test_bos_replaces_the_first_token_of_each_chunk() -> None:
    assert cut_chunks(list(range(8)), 4, 99) == [[99, 1, 2, 3], [99, 5, 6, 7]]


def test_a_text_shorter_than_a_chunk_is_refused() -> None:
    with pytest.raises(UserError, match="lower --context"):
        cut_chunks([1, 2, 3], 4, None)


def test_the_second_half_but_its_first_token_is_scored() -> None:
    ids = [5, 6, 7, 8, 9, 10, 11, 12]
    logprobs = [None, *({token_id: Logprob(-float(token_id))} for token_id in ids[1:])]
    output = RequestOutput("0", None, ids, [], RequestMetrics(0.0), prompt_logprobs=logprobs)
    assert scored_losses(output) == [10.0, 11.0, 12.0]


def test_error_bar_is_that_of_the_mean_times_the_perplexity() -> None:
    perplexity, stderr = summarize([1.0, 2.0, 3.0])
    assert perplexity == pytest.approx(math.exp(2))
    assert stderr == pytest.approx(math.exp(2) * math.sqrt((2 / 3) / 2))


def test_text_is_cut_between_characters(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("aéb".encode())
    assert read_text(path, 2) == "a"
    assert read_text(path, 0) == "aéb"
    path.write_bytes(b"a\xff")
    with pytest.raises(UserError, match="UTF-8"):
        read_text(path, 0)
    with pytest.raises(UserError, match="cannot read"):
        read_text(tmp_path / "missing", 0)


@pytest.mark.parametrize("change", [{"context": 3}, {"limit_bytes": -1}, {"max_chunks": -1}], ids=str)
def test_impossible_jobs_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(UserError, match="give"):
        PerplexityJob(Path("x"), **change)
