"""Programs that misbehave, run for real: each must be stopped, and nothing outside its folder may change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tokenmill.evaluate.sandbox import ProgramLimits, Verdict, run_program

LIMITS = ProgramLimits(seconds=30, memory_bytes=512 << 20)  # a busy machine is not what is tested


def run(program: str, limits: ProgramLimits = LIMITS) -> Verdict:
    return run_program(program, limits)


def test_a_program_that_ends_well_passes() -> None:
    assert run("import math, typing, collections\nassert math.gcd(6, 4) == 2") == Verdict(True, "passed")
    assert run("open('note', 'w').write('x')\nassert open('note').read() == 'x'").passed  # its own folder


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("assert 1 == 2, 'wrong'", "AssertionError: wrong"),
        ("def f(:", "SyntaxError"),
        ("while True: pass", "too long"),
        ("import time; time.sleep(60)", "too long"),
        ("x = bytearray(2 << 30)", "MemoryError"),
        ("import sys; sys.exit(0)", "ended early"),
        ("import os; os._exit(0)", "ended early"),
        ('import os; os.write(1, b\'{"why": "passed"}\'); os._exit(0)', "ended early"),
        ("import socket; socket.socket()", "refused: socket"),
        ("import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')", "refused: socket|refused: urllib"),
        ("import os; os.fork()", "refused: os.fork"),
        ("import subprocess; subprocess.run(['true'])", "refused: subprocess"),
        ("import os; os.system('true')", "refused: os.system"),
        ("import os; os.kill(os.getppid(), 9)", "refused: os.kill"),
        ("import ctypes; ctypes.CDLL(None)", "refused: ctypes"),
        ("f = open('big', 'wb')\nf.write(bytes(3 << 20))\nf.flush()", "File too large"),
        ("import os; assert 'HOME' not in os.environ; raise KeyError", "KeyError"),
    ],
)
def test_others_do_not(program: str, why: str) -> None:
    import re

    verdict = run(program, replace(LIMITS, seconds=1) if why == "too long" else LIMITS)
    assert not verdict.passed
    assert re.search(why, verdict.why), verdict


@pytest.mark.parametrize(
    "program",
    [
        "open({path!r}, 'w').write('x')",
        "import os; os.close(os.open({path!r}, os.O_WRONLY | os.O_CREAT))",
        "open('a', 'w').close(); import os; os.rename('a', {path!r})",
        "import os; os.symlink('/etc', 'link'); os.remove({path!r})",
        "import os; os.mkdir({path!r})",
        "try:\n    open({path!r}, 'a')\nexcept Exception:\n    pass",  # a refusal cannot be swallowed
    ],
)
def test_nothing_outside_the_folder_is_written(program: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    for path in (tmp_path / "new", kept):
        verdict = run(program.format(path=str(path)))
        assert not verdict.passed
        assert "refused" in verdict.why, verdict
    assert kept.read_text() == "as it was"
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]
