"""Programs that attack, run for real: none passes its tests without being right, and nothing outside changes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tokenmill.errors import UserError
from tokenmill.evaluate import confinement, sandbox
from tokenmill.evaluate.sandbox import ProgramLimits, Verdict, check_function
from tokenmill.evaluate.sandbox_child import decode, encode
from tokenmill.evaluate.tasks.humaneval import judge_completion

LIMITS = ProgramLimits(seconds=30, memory_bytes=512 << 20)  # a busy machine is not what is tested
TESTS = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-3) == 9\n"

confined = pytest.mark.skipif(bool(confinement.missing()), reason=f"the kernel lacks {confinement.missing()}")


def run(body: str, tests: str = TESTS, limits: ProgramLimits = LIMITS, setup: str = "") -> Verdict:
    """The program: `body` inside a function `f` of `x`, or a whole program that defines it."""
    program = body if "def f(" in body else "def f(x):\n" + "".join(f"    {line}\n" for line in body.splitlines())
    return check_function(program, setup, tests, "f", limits)


@confined
def test_a_right_function_passes() -> None:
    assert run("return x * x") == Verdict(True, "passed")
    assert run("import math, collections, typing, json, decimal, random\nreturn x * x").passed
    assert run("open('note', 'w').write('4')\nreturn x * x if open('note').read() else 0").passed  # its own folder


@confined
@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return 4", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("def g(x): return 1\n#def f(", "KeyError"),
        ("while True: pass", "too long"),
        ("import time; time.sleep(60)", "too long"),
        ("x = bytearray(2 << 30)", "MemoryError"),
        ("import sys; sys.exit(0)", "ended early"),
        ("raise SystemExit", "ended early"),
        ("import os; os._exit(0)", "ended early"),
        ("exit(0)", "NameError|ended early"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("with open('big', 'wb') as file: file.write(bytes(3 << 20))", "File too large"),
        ("return (each for each in [4])", "generator is not plain data"),
        ("return lambda: 4", "function is not plain data"),
        ("f.__globals__['__name__'] = 1\nraise ValueError('no')", "ValueError: no"),
    ],
)
def test_others_do_not(body: str, why: str) -> None:
    verdict = run(body, limits=replace(LIMITS, seconds=1) if why == "too long" else LIMITS)
    assert not verdict.passed
    assert re.search(why, verdict.why), verdict


FORGERIES = {
    "an object equal to everything": "class E(int):\n def __eq__(s, o): return True\n __hash__ = int.__hash__\ndef f(x): return E(7)",  # noqa: E501
    "patched builtins": "import builtins\nbuiltins.AssertionError = builtins.isinstance = lambda *a: True\ndef f(x): return 7",  # noqa: E501
    "the frames above": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        frame.f_globals.update(answer={'why': 'passed'}, encode=lambda v: 4)\n        frame = frame.f_back\n    return 7",  # noqa: E501
    "objects of the collector": "import gc\ndef f(x):\n    for each in gc.get_objects():\n"
    "        if type(each) is dict and 'why' in each: each['why'] = 'passed'\n    return 7",
    "every open file": "import os, json\ndef f(x):\n    data = json.dumps({'why': 'passed'}).encode()\n"
    "    for number in range(64):\n        try: os.write(number, data)\n        except OSError: pass\n    os._exit(0)",
    "printing": "import os\ndef f(x):\n    print('passed')\n    os.write(1, b'{\"why\": \"passed\"}')\n    os._exit(0)",
    "the checker's memory": "import os\ndef f(x):\n    for pid in range(1, 99999):\n"
    "        try: open(f'/proc/{pid}/mem', 'wb')\n        except OSError: pass\n    return 7",
    "a debugger": "import ctypes, os\ndef f(x):\n    return ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)",
    "an answer of another shape": "import os\ndef f(x):\n    body = b'[1]'\n"
    "    for number in range(3, 64):\n        try: os.write(number, len(body).to_bytes(4, 'little') + body)\n"
    "        except OSError: pass\n    return 4",
    "no function at all": "import os\ndef f(x): return 4\nos._exit(0)",
}


@confined
@pytest.mark.parametrize("program", FORGERIES.values(), ids=FORGERIES.keys())
def test_passing_cannot_be_forged(program: str) -> None:
    verdict = run(program)
    assert not verdict.passed, verdict


ESCAPES = {
    "open": "open({path!r}, 'w').write('x')",
    "os.open": "os.close(os.open({path!r}, os.O_WRONLY | os.O_CREAT))",
    "dir_fd": "folder = os.open({folder!r}, os.O_RDONLY)\nos.open({name!r}, os.O_WRONLY | os.O_CREAT, dir_fd=folder)",
    "dir_fd of the root": "folder = os.open('/', os.O_RDONLY)\nos.open({path!r}[1:], os.O_WRONLY | os.O_CREAT, dir_fd=folder)",  # noqa: E501
    "rename": "open('a', 'w').close()\nos.rename('a', {path!r})",
    "symlink": "os.symlink({folder!r}, 'link')\nopen('link/' + {name!r}, 'w')",
    "hard link": "os.link({path!r}, 'linked')\nopen('linked', 'w')",
    "remove": "os.remove({path!r})",
    "mkdir": "os.mkdir({path!r})",
    "chmod": "os.chmod({path!r}, 0o777)",
    "truncate": "os.truncate({path!r}, 0)",
    "native code": "import ctypes\nlibc = ctypes.CDLL(None)\nif libc.open({path!r}.encode(), 0o101, 0o666) < 0: raise OSError",  # noqa: E501
    "reading": "open({path!r}).read()",
    "listing": "os.listdir({folder!r})",
    "passwords": "open('/etc/passwd').read()",
    "the environment of others": "open('/proc/1/environ').read()",
    "fork": "os.fork()",
    "a shell": "if os.system('true') != 0: raise OSError",
    "a process": "import subprocess\nsubprocess.run(['true'])",
    "a thread": "import threading\nthreading.Thread(target=print).start()",
    "a socket": "import socket\nsocket.socket()",
    "a pair of sockets": "import socket\nsocket.socketpair()",
    "a raw socket call": "import ctypes\nif ctypes.CDLL(None).socket(2, 1, 0) < 0: raise OSError",
    "killing": "os.kill(os.getppid(), 9)",
    "killing everything": "os.kill(-1, 9)",
    "a signal by ownership": "import fcntl\nfcntl.fcntl(3, fcntl.F_SETOWN, os.getppid())",
    "mounting": "import ctypes\nif ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) != 0: raise OSError",
    "a name space": "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000) != 0: raise OSError",
    "memory of another": "import ctypes\nif ctypes.CDLL(None).process_vm_readv(os.getppid(), 0, 0, 0, 0, 0) < 0: raise OSError",  # noqa: E501
    "more limits": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (999, 999))",
}


@confined
@pytest.mark.parametrize("attempt", ESCAPES.values(), ids=ESCAPES.keys())
def test_nothing_outside_is_reached(attempt: str, tmp_path: Path) -> None:
    """The function answers rightly only if the attempt raised: passing proves that the attempt failed."""
    tmp_path.chmod(0o777)
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    kept.chmod(0o666)
    lines = attempt.format(path=str(kept), folder=str(tmp_path), name="kept").splitlines()
    tried = "".join(f"        {line}\n" for line in lines)
    errors = "(OSError, RuntimeError, ValueError)"
    program = (
        f"import os\ndef f(x):\n    try:\n{tried}    except {errors}:\n        return x * x\n    return 'escaped'\n"
    )
    verdict = run(program)
    assert verdict.passed, verdict
    assert kept.read_text() == "as it was"
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]


@confined
def test_exceptions_cross_by_name_and_values_as_plain_data() -> None:
    tests = (
        "def check(candidate):\n    try:\n        candidate('bad')\n    except ValueError as error:\n"
        "        assert str(error) == 'bad'\n    else:\n        assert False\n"
        "    value = candidate(1)\n    assert value == [1, 2.5, (3, None), {4}, {'a': b'b'}, 1j, 10**40, float('inf')]\n"  # noqa: E501
        "    assert type(value[2]) is tuple\n"
    )
    body = "if x == 'bad': raise ValueError(x)\nreturn [1, 2.5, (3, None), {4}, {'a': b'b'}, 1j, 10**40, float('inf')]"
    assert run(body, tests) == Verdict(True, "passed")


@confined
def test_what_cannot_cross_is_not_measured() -> None:
    verdict = run("return x(2)", "def check(candidate):\n    assert candidate(lambda n: n * n) == 4\n")
    assert not verdict.passed
    assert verdict.why.startswith("not measurable"), verdict


@confined
def test_tests_use_the_helpers_of_the_prompt_and_not_of_the_program() -> None:
    tests = "def check(candidate):\n    assert double(candidate(2)) == 8\n"
    program = "def double(x): return 8\ndef f(x): return 1\n"
    assert not run(program, tests, setup="def double(x): return 2 * x\n").passed
    assert run("return x * x", tests, setup="def double(x): return 2 * x\n").passed


def test_data_survives_the_way() -> None:
    for value in (
        None,
        True,
        -5,
        2**200,
        -(2**200),
        0.1,
        float("-inf"),
        "é\ud800",
        [(), ({1}, frozenset({2}))],
        {1: {(2,): 3}},
    ):
        assert decode(json.loads(json.dumps(encode(value)))) == value


def test_a_system_that_cannot_confine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.confinement, "missing", lambda: ["Landlock (Linux 5.13)"])
    with pytest.raises(UserError, match="--unsafe-code"):
        check_function("def f(x): return x * x", "", TESTS, "f", LIMITS)
    assert check_function("def f(x): return x * x", "", TESTS, "f", LIMITS, unsafe=True).passed


@confined
def test_every_stored_item_can_be_measured(data_path: Path) -> None:
    for line in (data_path / "tasks" / "humaneval.jsonl").read_text().splitlines():
        item = json.loads(line)
        assert judge_completion(item, item["canonical_solution"]).passed, item["task_id"]


@confined
def test_nothing_is_left_open() -> None:
    count: Callable[[], int] = lambda: len(os.listdir("/proc/self/fd"))  # noqa: E731
    before = count()
    for body in ("return x * x", "import os; os._exit(0)", "return 4"):
        run(body)
    assert count() == before
