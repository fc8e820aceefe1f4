"""Requests of a batch and its journal: what is refused and where, torn lines, answers that are kept once."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.serve.killed_disk import KilledDisk, KilledError
from tokenmill.serve.batches import journal as journal_module
from tokenmill.serve.batches.journal import Journal, JournalError
from tokenmill.serve.batches.lines import ENDPOINTS, LineError, Row, read_rows, result_line, unanswered_line

_LINE = {"custom_id": "a", "method": "POST", "url": ENDPOINTS[1], "body": {"prompt": "x"}}


def _write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def _row(name: str, body: bytes = b"{}") -> Row:
    return Row(1, name, ENDPOINTS[1], body)


def test_rows_are_read_in_order_with_their_bodies_as_they_are(tmp_path: Path) -> None:
    path = _write(tmp_path / "in", _LINE, "", _LINE | {"custom_id": "b", "body": {"number": 1e5}, "more": 1})
    path.write_text(path.read_text().rstrip("\n"))  # the last line end may be missing
    first, second = read_rows(path, ENDPOINTS, 1000)
    assert (first.number, first.custom_id, first.body) == (1, "a", b'{"prompt": "x"}')
    assert (second.number, second.custom_id) == (3, "b")
    assert first.id != second.id
    assert Row(9, "a", ENDPOINTS[1], first.body).id == first.id
    assert Row(1, "a", ENDPOINTS[1], b"{}").id != first.id


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("{", "invalid_json_line"),
        ('{"custom_id": "b", "url": "/v1/completions", "body": ' + "[" * 100_000, "invalid_json_line"),
        ("[]", "invalid_line"),
        ({"custom_id": "b"}, "invalid_line"),
        (_LINE | {"custom_id": 7}, "invalid_line"),
        (_LINE, "duplicate_custom_id"),
        (_LINE | {"custom_id": ""}, "invalid_custom_id"),
        (_LINE | {"custom_id": "x" * 513}, "invalid_custom_id"),
        (_LINE | {"custom_id": "b", "method": "GET"}, "invalid_method"),
        (_LINE | {"custom_id": "b", "url": "/v1/models"}, "invalid_url"),
        (_LINE | {"custom_id": "b", "body": [1]}, "invalid_body"),
        (_LINE | {"custom_id": "b", "body": {"stream": True}}, "invalid_body"),
        (_LINE | {"custom_id": "b", "body": {"prompt": "x" * 300_000}}, "line_too_long"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: Any, code: str) -> None:
    with pytest.raises(LineError) as caught:
        list(read_rows(_write(tmp_path / "in", _LINE, line), ENDPOINTS, 200_000))
    assert (caught.value.line, caught.value.code) == (2, code)


def test_a_file_has_at_least_one_request_and_not_too_many(tmp_path: Path) -> None:
    with pytest.raises(LineError, match="no requests"):
        list(read_rows(_write(tmp_path / "in", "", " "), ENDPOINTS, 1000))
    path = _write(tmp_path / "in", *(_LINE | {"custom_id": str(number)} for number in range(4)))
    with pytest.raises(LineError, match="more than 3"):
        list(read_rows(path, ENDPOINTS, 1000, max_rows=3))


def test_a_journal_keeps_one_answer_for_each_request(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out")
    assert journal.append("a", result_line(_row("a"), 200, "r", b'{"text":"1"}'))
    assert not journal.append("a", result_line(_row("a"), 200, "r", b'{"text":"2"}'))
    assert journal.append("b", result_line(_row("b"), 400, "r", b'{"error":{}}'))
    assert journal.append("c", unanswered_line(_row("c"), "batch_expired", "late"))
    with pytest.raises(BlockingIOError):
        Journal(tmp_path / "out")
    journal.close()
    assert not journal.append("d", result_line(_row("d"), 200, "r", b"{}"))
    again = Journal(tmp_path / "out")
    assert (list(again.ids), again.num_succeeded, again.num_failed) == (["a", "b", "c"], 1, 2)
    assert [json.loads(line)["response"] and json.loads(line)["response"]["body"] for _, line in again.lines()] == [
        {"text": "1"}, {"error": {}}, None]  # fmt: skip
    assert again.num_bytes == (tmp_path / "out").stat().st_size
    again.close()


def test_a_journal_cut_at_any_byte_loses_the_torn_answer_only(tmp_path: Path) -> None:
    first = result_line(_row("a"), 200, "r", b'{"text":"\xc3\xa9"}')
    second = result_line(_row("b"), 200, "r", b"{}")
    path = tmp_path / "out"
    for cut in range(len(first) + len(second) + 1):
        path.write_bytes((first + second)[:cut])
        journal = Journal(path)
        assert list(journal.ids) == ["a", "b"][: (cut >= len(first)) + (cut == len(first + second))]
        journal.append("b", second)
        journal.close()
        assert path.read_bytes() == (second if cut < len(first) else first + second)
    path.write_bytes(first + b"\0" * 100)
    journal = Journal(path)
    assert path.read_bytes() == first
    journal.close()


@pytest.mark.parametrize("content", [b"my notes", b"my notes\n", b'{"custom_id": "a"}\n', b'{"id":"x"', b"{}\n"])
def test_what_is_no_journal_is_left_as_it_was(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "out").write_bytes(content)
    with pytest.raises(JournalError):
        Journal(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == content


def test_a_full_disk_leaves_the_journal_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    journal = Journal(path)
    line = result_line(_row("a"), 200, "r", b"{}")
    journal.append("a", line)

    def full(fd: int, data: bytes) -> None:
        import os

        os.write(fd, data[:10])
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patched:
        patched.setattr(journal_module, "write_all", full)
        with pytest.raises(OSError, match="no space"):
            journal.append("b", result_line(_row("b"), 200, "r", b"{}"))
    assert path.read_bytes() == line
    assert journal.append("b", result_line(_row("b"), 200, "r", b"{}"))
    journal.close()


def test_a_kill_at_any_write_of_a_journal_keeps_what_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_SYNC_SECONDS", -1.0)  # after each answer
    names = ["a", "b", "c"]
    for number in range(20):
        path, disk, told = tmp_path / str(number), KilledDisk(number), []
        journal = Journal(path)
        with monkeypatch.context() as patched:
            disk.use(patched)
            try:
                for name in names:
                    journal.append(name, result_line(_row(name), 200, "r", b"{}"))
                    told.append(name)
            except KilledError:
                pass
        journal.close()
        again = Journal(path)
        assert list(again.ids)[: len(told)] == told
        for name in names:
            again.append(name, result_line(_row(name), 200, "r", b"{}"))
        assert [entry.custom_id for entry, _ in again.lines()] == names
        again.close()
        if not disk.dead:
            return
    pytest.fail("more writes than expected")
