"""The package without its extras: what computes still works, and a verb that needs more says what to install."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenmill.cli.extras import EXTRAS, missing_extra

_ROOT = Path(__file__).parents[3]
_HIDDEN = sorted(module for modules in EXTRAS.values() for module in modules)

# Finders that know nothing of the hidden modules, as if they were not installed.
_PROGRAM = f"""
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {_HIDDEN!r} else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
from tokenmill.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def _without_extras(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _PROGRAM, *arguments]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "verb"),
    [(("serve", "absent"), "serve"), (("bench", "serve", "--base-url", "http://a"), "bench serve")],
)
def test_a_verb_without_its_extra_says_what_to_install(arguments: tuple[str, ...], verb: str) -> None:
    done = _without_extras(*arguments)
    assert done.returncode == 2
    assert done.stderr == f"error: {verb} needs tokenmill[serve]\ntry: pip install 'tokenmill[serve]'\n"


def test_a_model_runs_without_any_extra(model_path: Callable[[str], Path]) -> None:
    done = _without_extras(
        "run", str(model_path("stories15m")), "Once", "--raw", "--max-tokens", "2", "--temperature", "0"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "upon" in done.stdout


def test_a_plan_needs_no_extra() -> None:
    load = ("--input-len", "9", "--output-len", "9", "--concurrency", "2")
    assert _without_extras("plan", "llama-3.1-8b", "--gpu", "h100", *load, "--json").returncode == 0


def test_modules_of_no_extra_are_our_bug() -> None:
    assert missing_extra(ModuleNotFoundError("absent", name="absent.part"), ["run"]) is None


def test_the_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) <= set(project["optional-dependencies"])
