"""Results as JSON and as screens, errors as lines; values of flags."""

from __future__ import annotations

import json

import pytest

from tokenmill.cli.output import emit, print_error
from tokenmill.cli.render.screen import Screen
from tokenmill.cli.values import parse_biases, parse_ids
from tokenmill.errors import UserError

RESULT = {
    "model": "m",
    "speed": 12.3456,
    "infinite": float("-inf"),
    "nothing": None,
    "kv": {"dtype": "float32", "ids": [1, 2], "bytes_full_context": 2500000},
    "kernels": [{"op": "add", "implementation": "cpu", "declined": ["triton: no GPU"]}],
}


def _no_screen() -> Screen:
    raise AssertionError("a screen was made for --json")


def test_json_is_one_object_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    emit(RESULT, True, _no_screen)
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    assert json.loads(out) == {**RESULT, "infinite": None}


def test_a_person_gets_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    emit(RESULT, False, lambda: Screen("m: 12.3 tok/s"))
    assert capsys.readouterr().out == "m: 12.3 tok/s\n\nAll figures: --json\n"


@pytest.mark.parametrize(
    ("remedy", "lines"), [("give\n  less", "error: too much\ntry: give less\n"), ("", "error: too much\n")]
)
def test_errors_are_one_line_each(remedy: str, lines: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_error("too\nmuch", remedy)
    assert capsys.readouterr() == ("", lines)


@pytest.mark.parametrize(("text", "ids"), [("1,2,3", [1, 2, 3]), ("[4, 5]", [4, 5]), ("6 7", [6, 7]), ("-1", [-1])])
def test_token_ids(text: str, ids: list[int]) -> None:
    assert parse_ids(text) == ids


@pytest.mark.parametrize("text", ["", "a", "1,,b", "1.5"])
def test_what_is_no_token_ids(text: str) -> None:
    with pytest.raises(UserError, match="1,2,3"):
        parse_ids(text)


def test_biases() -> None:
    assert parse_biases(["1=2", "3=-0.5"]) == {1: 2.0, 3: -0.5}
    with pytest.raises(UserError, match="token id first"):
        parse_biases(["1:2"])
