"""Runs tests against a function that a model wrote; the verdict is made in a process that never runs the model's code.

Two children (sandbox_child.py), both confined by the kernel: the candidate holds the program, the checker the
tests; it calls the candidate's function through pipes, with plain data. Where the kernel cannot confine them,
programs are refused unless the caller accepts that (`unsafe`). Called by the task humaneval.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenmill.errors import UserError
from tokenmill.evaluate import confinement

_CHILD = Path(__file__).with_name("sandbox_child.py")
_START_SECONDS = 20.0  # for the interpreters themselves, on a busy machine
_TIME_SIGNALS = (-signal.SIGXCPU, -signal.SIGKILL, -signal.SIGALRM)


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    seconds: float = 5.0  # of processor time; twice that on the clock
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20  # of any one file


@dataclass(frozen=True, slots=True)
class Verdict:
    passed: bool
    why: str  # "passed", or what ended the program; "not measurable: ..." where the tests cannot reach across processes


def require_confinement() -> None:
    """Raises UserError where programs cannot be confined here."""
    missing = confinement.missing()
    if missing:
        raise UserError(
            f"programs that a model wrote cannot be confined on this system: it lacks {' and '.join(missing)}",
            "run the evaluation on Linux 5.13 or later, or in a container of its own with --unsafe-code",
        )


def check_function(
    program: str, setup: str, tests: str, entry_point: str, limits: ProgramLimits | None = None, unsafe: bool = False
) -> Verdict:
    """`program` defines `entry_point`; `setup` (trusted) is what `tests` may use beside it; `tests` define `check`."""
    if not unsafe:
        require_confinement()
    limits = limits or ProgramLimits()
    common = {**asdict(limits), "entry_point": entry_point, "unsafe": unsafe}
    with contextlib.ExitStack() as stack:
        calls, results = os.pipe(), os.pipe()
        folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenmill-program-")) for _ in range(2)]
        candidate_order = {**common, "program": program, "folder": folders[0]}
        checker_order = {**common, "setup": setup, "tests": tests, "folder": folders[1]}
        candidate = stack.enter_context(_child("candidate", calls[0], results[1], folders[0]))
        checker = stack.enter_context(_child("checker", results[0], calls[1], folders[1]))
        for descriptor in (*calls, *results):  # the children have their ends: a child that ends is seen by the other
            os.close(descriptor)
        try:
            _give(candidate, candidate_order)
            answer, _ = checker.communicate(json.dumps(checker_order).encode(), timeout=_patience(limits))
            candidate.wait(timeout=_patience(limits))
        except (subprocess.TimeoutExpired, BrokenPipeError):
            return Verdict(False, "too long")
    return _verdict(answer, candidate.returncode, checker.returncode)


def _patience(limits: ProgramLimits) -> float:
    return 2 * limits.seconds + _START_SECONDS


@contextlib.contextmanager
def _child(role: str, incoming: int, outgoing: int, folder: str) -> Iterator[subprocess.Popen[bytes]]:
    # -I, -S: no environment, no packages beside the standard library; -B: no byte code written.
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(_CHILD), role, str(incoming), str(outgoing)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={"PATH": os.defpath},
        pass_fds=(incoming, outgoing),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _give(process: subprocess.Popen[bytes], order: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(order).encode())
    process.stdin.close()


def _verdict(answer: bytes, candidate_code: int, checker_code: int) -> Verdict:
    """Only the checker speaks here; the exit code of the candidate explains an early end, and never makes it a pass."""
    try:
        reply = json.loads(answer)
    except ValueError:
        reply = {}
    if "missing" in reply:
        raise UserError(
            f"programs that a model wrote could not be confined: {' and '.join(reply['missing'])} failed",
            "run the evaluation in a container of its own with --unsafe-code",
        )
    why = str(reply.get("why", ""))[:500]
    if why == "passed":
        return Verdict(True, why)
    if not why or why == "ended early":
        if candidate_code in _TIME_SIGNALS or checker_code in _TIME_SIGNALS:
            return Verdict(False, "too long")
        why = "ended early"
    return Verdict(False, why)
