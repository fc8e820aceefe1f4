"""The protocols: chunks, BOS, which tokens are scored, sliding windows, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import UserError
from tokenmill.evaluate.windows import TextJob, Window, cut_chunks, cut_strides, read_text


def ids(windows: list[Window]) -> list[list[int]]:
    return [window.token_ids for window in windows]


def test_chunks_are_consecutive_and_a_short_rest_is_left() -> None:
    assert ids(cut_chunks(range(11), 4, None)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ids(cut_chunks(range(11), 4, None, max_chunks=1)) == [[0, 1, 2, 3]]


def test_bos_replaces_the_first_token_of_each_chunk() -> None:
    assert ids(cut_chunks(range(8), 4, 99)) == [[99, 1, 2, 3], [99, 5, 6, 7]]


def test_a_text_shorter_than_a_chunk_is_refused() -> None:
    with pytest.raises(UserError, match="lower --context"):
        cut_chunks([1, 2, 3], 4, None)


def test_the_second_half_but_its_first_token_is_scored() -> None:
    (window,) = cut_chunks(range(8), 8, None)
    assert window.token_ids[window.first :] == [5, 6, 7]
    assert window.passage.token_ids == [0, 1, 2, 3, 4, 5, 6]  # nothing is asked of the last token
    assert window.passage.first == 4  # its row predicts token 5
    assert len(window.passage.token_ids) - window.passage.first == window.num_scored


def test_disjoint_windows_score_all_but_their_first_token() -> None:
    windows = cut_strides(range(10), 4, 4)
    assert ids(windows) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [window.first for window in windows] == [1, 1, 1]


@settings(deadline=None)
@given(st.integers(2, 60), st.integers(4, 20), st.integers(1, 19))
def test_overlapping_windows_score_every_token_but_the_first_once(length: int, context: int, stride: int) -> None:
    windows = cut_strides(range(length), context, min(stride, context - 1))
    scored = [token for window in windows for token in window.token_ids[window.first :]]
    assert scored == list(range(1, length))
    assert all(len(window.token_ids) <= context for window in windows)


def test_sliding_windows_as_hugging_face_cuts_them() -> None:
    windows = cut_strides(range(10), 6, 3)
    assert ids(windows) == [[0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 8], [6, 7, 8, 9]]
    assert [window.first for window in windows] == [1, 3, 3]
    assert len(cut_strides(range(10), 6, 3, max_windows=2)) == 2


def test_text_is_cut_between_characters(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("aéb".encode())
    assert read_text(path, 2) == "a"
    assert read_text(path) == "aéb"
    path.write_bytes(b"a\xff")
    with pytest.raises(UserError, match="UTF-8"):
        read_text(path)
    with pytest.raises(UserError, match="cannot read"):
        read_text(tmp_path / "missing")


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"context": 3}, "give at least 4"),
        ({"limit_bytes": -1}, "0 or more"),
        ({"max_chunks": -1}, "0 or more"),
        ({"protocol": "strid"}, "did you mean 'stride'"),
        ({"stride": 8}, "--protocol stride"),
        ({"protocol": "stride", "stride": 513}, "give 1 to --context"),
    ],
    ids=str,
)
def test_impossible_jobs_are_refused(change: dict[str, int], remedy: str) -> None:
    with pytest.raises(UserError, match=remedy):
        TextJob(Path("x"), **change)  # type: ignore[arg-type]
