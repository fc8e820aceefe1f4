"""Two minutes of chaos with the code of benchmarks/soak.py, and a shorter form that the suite always runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_PROGRAM = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def _soak(*flags: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(_PROGRAM), "--chaos", "--json", *flags], capture_output=True, text=True, timeout=900
    )
    print(done.stderr)  # the table, where the test fails
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _wrong(result: dict[str, Any], *but: str) -> dict[str, Any]:
    return {name: check for name, check in result["checks"].items() if not check["ok"] and name not in but}


def test_a_quarter_of_a_minute_of_chaos() -> None:
    """How fast an engine is back is measured on a quiet machine, by the longer forms."""
    result = _soak("--seconds", "15", "--clients", "16")
    assert not _wrong(result, "engine back (slowest), s"), result["problems"]
    assert result["faults"]["engine"]


@pytest.mark.slow
def test_two_minutes_of_chaos() -> None:
    result = _soak("--minutes", "2")
    assert not _wrong(result), (result["problems"], result["recoveries"])
    assert len(result["recoveries"]) >= 3
