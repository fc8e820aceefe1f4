"""Runs a program that a model wrote, in a separate process with resource limits, no network and an empty folder.

`run_program` says whether the program came to its end. The child (sandbox_child.py) restricts itself before it runs the
program; the time limit is enforced from here as well. Protects against accidents, not against an attacker who knows
Python's internals: for that, run the whole evaluation in a container. Called by the task humaneval.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

_CHILD = Path(__file__).with_name("sandbox_child.py")
_START_SECONDS = 20.0  # for the interpreter itself, on a busy machine


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    seconds: float = 5.0  # of processor time; twice that on the clock
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20  # of any one file


@dataclass(frozen=True, slots=True)
class Verdict:
    passed: bool
    why: str  # "passed", or what ended the program


def run_program(program: str, limits: ProgramLimits | None = None) -> Verdict:
    """Passed: the last line was reached without an exception."""
    limits = limits or ProgramLimits()
    word = secrets.token_hex(16)  # proves that the end was reached: an early exit cannot say it
    with tempfile.TemporaryDirectory(prefix="tokenmill-program-") as folder:
        order = {"program": program, "word": word, "folder": folder, **asdict(limits)}
        # -I: no environment, no user packages; -B: no byte code written.
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath},
            start_new_session=True,
        )
        try:
            answer, _ = process.communicate(json.dumps(order).encode(), timeout=2 * limits.seconds + _START_SECONDS)
        except subprocess.TimeoutExpired:
            return Verdict(False, "too long")
        finally:
            _end(process)
    return _verdict(answer, word, process.returncode)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The program and all it may have started: they are a session of their own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _verdict(answer: bytes, word: str, code: int) -> Verdict:
    try:
        reply = json.loads(answer)
        if reply["word"] == word:
            return Verdict(reply["why"] == "passed", str(reply["why"])[:500])
    except (ValueError, KeyError, TypeError):
        pass
    if code in (-signal.SIGXCPU, -signal.SIGKILL, -signal.SIGALRM):
        return Verdict(False, "too long")
    return Verdict(False, f"ended early with code {code}")
