"""The counts of tools/house_report.py, on a small tree whose numbers are known."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.house_report import components, imports, num_floors

ROOT = Path(__file__).parents[3]


def test_floors_and_circles(tmp_path: Path) -> None:
    package = tmp_path / "tokenmill"
    (package / "runtime").mkdir(parents=True)
    sources = {
        "__init__": "",
        "runtime/__init__": "",
        "runtime/top": "from tokenmill.runtime.middle import x",
        "runtime/middle": "from tokenmill.runtime import low",
        "runtime/low": "def late():\n    import tokenmill.runtime.other",
        "runtime/other": "from tokenmill.runtime.low import late",
    }
    for name, text in sources.items():
        (package / f"{name}.py").write_text(text)
    graph = imports(tmp_path)
    assert graph["tokenmill.runtime.middle"] == {"tokenmill.runtime.low"}
    circles = [sorted(group) for group in components(graph) if len(group) > 1]
    assert circles == [["tokenmill.runtime.low", "tokenmill.runtime.other"]]
    assert num_floors(graph) == 3


def test_this_house_has_no_circles() -> None:
    command = [sys.executable, str(ROOT / "tools" / "house_report.py")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "import circles: 0" in shown
