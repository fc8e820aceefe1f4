"""What a run remembers: it comes back, it belongs to one question, and a death is seen."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tokenmill.errors import UserError
from tokenmill.optimize.store import Store, question_key


def test_what_was_remembered_comes_back(tmp_path: Path) -> None:
    Store(tmp_path, "k").remember("short", "Q8_0", {"loss": 0.1})
    again = Store(tmp_path, "k")
    assert again.recall("short", "Q8_0") == {"loss": 0.1}
    assert again.recall("quality", "Q8_0") is None
    assert Store(tmp_path, "k", restart=True).recall("short", "Q8_0") is None


def test_another_question_is_refused(tmp_path: Path) -> None:
    Store(tmp_path, question_key({"model": "a"})).remember("short", "x", 1)
    with pytest.raises(UserError, match="another model"):
        Store(tmp_path, question_key({"model": "b"}))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "measurements.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        Store(tmp_path, "k")


def test_an_attempt_that_ends_in_order_leaves_no_mark_and_a_killed_one_does(tmp_path: Path) -> None:
    store = Store(tmp_path, "k")

    def interrupted() -> None:
        with store.attempt("Q8_0"):
            assert json.loads((tmp_path / "measurements.json").read_text())["attempt"] == "Q8_0"
            assert Store(tmp_path, "k").interrupted_attempt == "Q8_0"  # what a process sees that starts after a kill -9
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert Store(tmp_path, "k").interrupted_attempt is None


def test_a_write_that_is_cut_short_leaves_the_measurements_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, "k")
    store.remember("short", "Q8_0", 1)

    def power_fails(_descriptor: int) -> None:
        raise OSError("no power")

    monkeypatch.setattr(os, "fsync", power_fails)
    with pytest.raises(OSError, match="no power"):
        store.remember("short", "Q4_0", 2)
    assert Store(tmp_path, "k").recall("short", "Q8_0") == 1
    assert Store(tmp_path, "k").recall("short", "Q4_0") is None
