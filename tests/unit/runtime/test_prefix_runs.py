"""Rows that begin with the same pages: which runs are found, how long their prefix is, when none is worth it."""

from __future__ import annotations

from tokenmill.runtime.executors.cuda.prefix_runs import MAX_RUNS, PrefixRun, find_runs

PAGE = 16


def rows(prefix: int, count: int, pages: int, own: int = 2) -> list[list[int]]:
    """`count` tables that share `pages` pages and have `own` more each."""
    first = 1_000_000 * prefix
    common = list(range(first, first + pages))
    return [[*common, *(first + 1000 + own * row + n for n in range(own))] for row in range(count)]


def find(tables: list[list[int]]) -> list[PrefixRun]:
    return find_runs(tables, [len(table) * PAGE - 1 for table in tables], PAGE)


def test_one_run_among_rows_of_their_own() -> None:
    tables = [[7, 8], *rows(1, 20, 100), [9]]
    assert find(tables) == [PrefixRun(1, 21, 1600)]


def test_several_runs_each_with_its_own_length() -> None:
    tables = [*rows(1, 5, 128), *rows(2, 6, 100), [3, 4], *rows(5, 4, 128)]
    assert find(tables) == [PrefixRun(0, 5, 2048), PrefixRun(5, 11, 1600), PrefixRun(12, 16, 2048)]


def test_a_run_that_saves_most_is_alone() -> None:
    tables = [*rows(1, 60, 128), *rows(2, 3, 100)]
    assert find(tables) == [PrefixRun(0, 60, 2048)]


def test_pages_that_a_row_writes_do_not_count() -> None:
    tables = rows(1, 20, 100, own=0)
    assert find_runs(tables, [1000] * 20, PAGE) == [PrefixRun(0, 20, 992)]


def test_nothing_where_little_is_saved() -> None:
    assert find([*rows(1, 2, 100), *rows(2, 2, 100)]) == []
    assert find([[1], [2], [3]]) == []
    assert find([[1, 2, 3]]) == []


def test_the_runs_that_save_most_where_there_are_too_many() -> None:
    tables = [table for prefix in range(MAX_RUNS + 6) for table in rows(prefix, 3, 64 + prefix)]
    found = find(tables)
    assert len(found) == MAX_RUNS
    assert found == sorted(found)
    assert min(run.tokens for run in found) == (64 + 6) * PAGE
