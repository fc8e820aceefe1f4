"""Planning and simulating answer in an interpreter in which torch cannot be imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def answered(*arguments: str) -> dict[str, Any]:
    """The command's JSON answer; `None` in `sys.modules` makes every import of torch fail."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from tokenmill.cli.main import main\n"
        f"sys.exit(main({[*arguments, '--json']!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_plan(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    found = answered("plan", "llama-3.1-8b", "--gpu", "h100x1", "--concurrency", "8", "--explain", "--html", str(page))
    assert found["plan"]["output_tok_s"]["value"] > 0
    assert page.read_text(encoding="utf-8").rstrip().endswith("</html>")


def test_simulate(tmp_path: Path) -> None:
    page = tmp_path / "simulation.html"
    load = ("--rate", "4", "--input-len", "256", "--output-len", "32", "--limit", "20", "--html", str(page))
    found = answered("simulate", "llama-3.1-8b", "--gpu", "h100x1", *load)
    assert found["requests"] == 20
    assert page.exists()


@pytest.mark.parametrize("alias", ["smollm2", "stories15m"])
def test_plan_of_a_file(alias: str, model_path: Callable[[str], Path]) -> None:
    found = answered("plan", str(model_path(alias)), "--gpu", "rtx-4090", "--concurrency", "2")
    assert found["parameters"] > 1e6


def test_validate(tmp_path: Path) -> None:
    from tests.unit.plan.validate.test_validate import write

    found = answered("plan", "--validate", str(write(tmp_path / "rows.csv", {}, {"isl": "2048"})))
    assert found["rows"] == 2
