"""The command on a real terminal (a pty): a framed headline, colour, one screen; the same words as in a pipe."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pty = pytest.importorskip("pty", reason="needs a Unix terminal")

_CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
_FRAME = str.maketrans("", "", "╭╮╰╯│─━")


def on_terminal(*arguments: str, **variables: str) -> str:
    """What a terminal of 100 columns is sent; stderr goes there as well."""
    main_end, other_end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "50", **variables}
    if "NO_COLOR" not in variables:
        environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "tokenmill", *arguments]
    process = subprocess.Popen(command, stdin=other_end, stdout=other_end, stderr=other_end, env=environment)
    os.close(other_end)
    received = bytearray()
    try:
        while piece := os.read(main_end, 65536):
            received += piece
    except OSError:
        pass  # Linux reports the end of a terminal as an error
    finally:
        os.close(main_end)
    assert process.wait(timeout=60) == 0, received.decode()
    return received.decode().replace("\r\n", "\n")


def in_pipe(*arguments: str) -> str:
    command = [sys.executable, "-m", "tokenmill", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


def words(text: str) -> list[str]:
    return re.sub(r"[#.]{30}", "", _CODES.sub("", text).translate(_FRAME)).split()


def test_doctor(model_path: Callable[[str], Path]) -> None:
    model_path("stories15m")
    shown = on_terminal("doctor")
    assert shown.startswith("\x1b[")
    lines = _CODES.sub("", shown).splitlines()
    assert lines[0].startswith("╭")
    assert re.match(r"│ Ready: \w+ answered with 4 tokens", lines[1])
    assert {"Machine", "Installation", "Models in the cache"} <= set(lines)
    assert len(lines) < 50


def test_inspect(model_path: Callable[[str], Path]) -> None:
    model_path("stories15m")
    shown = on_terminal("inspect", "stories15m")
    piped = in_pipe("inspect", "stories15m")
    assert "\x1b[32m" in shown  # a compiled kernel is good news
    assert "\x1b" not in piped
    assert piped.isascii()
    assert words(shown) == words(piped)
    assert len(shown.splitlines()) < 50


def test_run_ends_with_a_quiet_footer(model_path: Callable[[str], Path]) -> None:
    model_path("stories15m")
    shown = _CODES.sub("", on_terminal("run", "stories15m", "Once upon a time", "--max-tokens", "6", NO_COLOR="1"))
    assert re.search(r"\n\[6 tokens, .+ tok/s, first after .+ m?s, prompt \d tokens, length\]\n", shown), shown
