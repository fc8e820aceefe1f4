"""Screens on a terminal and in a pipe: tones become colours, shares become bars, commands stay whole."""

from __future__ import annotations

import io

import pytest

from tokenmill.cli.render.draw import as_text, show
from tokenmill.cli.render.screen import Bar, Cell, Facts, Lines, Screen, Table, left, right, shares

SCREEN = Screen(
    "2 x h100: $0.41",
    "good",
    [
        Facts("Where", [("path", "a/b"), ("basis", Cell("measured", "dim"))]),
        Table(
            "Rates", (left("phase"), right("rate"), left("")), [("prefill", "9", Bar(0.5)), ("decode", "1,234", Bar(0))]
        ),
        shares("Memory", [("weights", 3, "3 GiB", "plain"), ("KV", 1, "1 GiB", "warning")]),
        Lines("Run", ["tokenmill serve " + "x" * 120]),
    ],
    [Cell("the reason"), Cell("an assumption", "warning"), Cell("a refusal", "bad"), Cell("a gain", "good")],
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _on_terminal(monkeypatch: pytest.MonkeyPatch, **variables: str) -> str:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "100", **variables}.items():
        monkeypatch.setenv(name, value)
    file = Terminal()
    show(SCREEN, file)
    return file.getvalue()


def test_a_pipe_gets_plain_text() -> None:
    assert as_text(SCREEN).splitlines() == [
        "2 x h100: $0.41",
        "",
        "Where",
        "  path   a/b",
        "  basis  measured",
        "",
        "Rates",
        "  phase     rate",
        "  prefill      9  ###############...............",
        "  decode   1,234  ..............................",
        "",
        "Memory",
        "  weights  3 GiB  75%  ######################........",
        "  KV       1 GiB  25%  ########......................",
        "",
        "Run",
        "  tokenmill serve " + "x" * 120,
        "",
        "- the reason",
        "! an assumption",
        "x a refusal",
        "+ a gain",
        "",
        "All figures: --json",
    ]


def test_a_file_is_a_pipe() -> None:
    file = io.StringIO()
    show(SCREEN, file)
    assert file.getvalue() == as_text(SCREEN)


def test_tones_are_colours_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = _on_terminal(monkeypatch)
    assert "╭" in text
    assert "\x1b[1;32m2 x h100: $0.41" in text
    assert "\x1b[33man assumption" in text
    assert "\x1b[31ma refusal" in text
    assert "━" * 15 in text


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    text = _on_terminal(monkeypatch, NO_COLOR="1")
    assert not [code for code in ("[31m", "[32m", "[33m", "[36m") if code in text]
    assert "━" * 15 + "─" * 15 in text.replace("\x1b[2m", "").replace("\x1b[0m", "")  # a bar can still be read


def test_a_share_that_exists_is_seen() -> None:
    text = as_text(Screen("", sections=[shares("", [("all", 999, "999", "plain"), ("little", 1, "1", "plain")])]))
    assert "  little    1   0.1%  #............................." in text.splitlines()
