"""Generated programs that leave their folder or claim to have passed (S12). Against the sandbox of this tree."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tokenmill.errors import UserError
from tokenmill.evaluate.sandbox import ProgramLimits, Verdict, check_function

_LIMITS = ProgramLimits(seconds=20, memory_bytes=512 << 20)


def _run(program: str) -> Verdict:
    """The program as the body of a function whose answer is wrong, unless it gives the right one."""
    body = "def answer():\n" + textwrap.indent(program, "    ")
    tests = "def check(candidate):\n    assert candidate() == 42\n"
    try:
        return check_function(body, "", tests, "answer", _LIMITS)
    except UserError as error:  # no isolation on this system, and nobody allowed to go without
        pytest.skip(f"programs are not run here: {error}")


# Each looks for the verdict in whatever the sandbox itself left in memory, then fails.
FORGERIES = {
    "the frame above": """
import sys, os, json
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        if isinstance(value, dict) and "word" in value:
            for descriptor in range(64):
                try:
                    os.write(descriptor, json.dumps({"word": value["word"], "why": "passed"}).encode())
                except OSError:
                    pass
            os._exit(0)
    frame = frame.f_back
assert False
""",
    "all objects": """
import gc, os, json
for value in gc.get_objects():
    if isinstance(value, dict) and "word" in value and "program" in value:
        for descriptor in range(64):
            try:
                os.write(descriptor, json.dumps({"word": value["word"], "why": "passed"}).encode())
            except OSError:
                pass
        os._exit(0)
assert False
""",
    "another module": """
import sys
main = sys.modules["__main__"]
for name in dir(main):
    if callable(getattr(main, name, None)) and name.startswith("_run"):
        setattr(main, name, lambda *_: "passed")
assert False
""",
    "a patched json": """
import json, sys
old = json.dumps
json.dumps = lambda value, *a, **k: old({**value, "why": "passed"} if isinstance(value, dict) else value)
assert False
""",
    "an exit hook": "import atexit, os\natexit.register(lambda: os._exit(0))\nassert False",
    "a quiet exit": "import sys\nsys.exit(0)",
    "a hard exit": "import os\nos._exit(0)",
    "a trace": "import sys\nsys.settrace(lambda *a: None)\nsys.excepthook = lambda *a: None\nassert False",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_s12_no_program_makes_its_own_verdict(name: str) -> None:
    verdict = _run(FORGERIES[name])
    assert not verdict.passed, verdict


@pytest.mark.parametrize(
    "program",
    [
        "import os\nd = os.open('/', os.O_RDONLY)\nos.open({name!r}, os.O_WRONLY | os.O_CREAT, dir_fd=d)",
        "import os\nos.chdir('/')\nopen({name!r}, 'w').write('x')",
        "import os\nd = os.open('/', os.O_RDONLY)\nos.mkdir({name!r}, dir_fd=d)",
        "import pathlib\npathlib.Path('/' + {name!r}).write_text('x')",
        "import os\nos.symlink('/' + {folder!r}, 'out')\nopen('out/' + {last!r}, 'w').write('x')",
        "import shutil\nopen('a', 'w').close()\nshutil.copy('a', '/' + {name!r})",
        "import sqlite3\nsqlite3.connect('/' + {name!r}).execute('create table t (x)')",
    ],
)
def test_s12_nothing_is_written_outside_the_folder(program: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    goal = tmp_path / "escaped"
    relative = str(goal).lstrip("/")
    _run(program.format(name=relative, last=goal.name, folder=str(tmp_path).lstrip("/")))
    assert not goal.exists()


def test_s12_a_right_program_still_passes() -> None:
    assert _run("return 40 + len([2, 1])").passed
