"""The import graph: no circles between modules, type-checking imports included, and a server process without torch."""

from __future__ import annotations

import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """By module: those of the package that it imports, anywhere in the file."""
    graph = grimp.build_graph("tokenmill", cache_dir=None)
    return {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}


def test_no_circles(imports: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail("modules import each other: " + " -> ".join(reversed(error.args[1])))


def test_a_circle_would_be_found() -> None:
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"c"}, "c": {"a"}}).prepare()


def test_type_checking_imports_are_in_the_graph(imports: dict[str, set[str]]) -> None:
    assert "tokenmill.engine.async_engine" in imports["tokenmill"]  # `if TYPE_CHECKING` in the package itself


def test_the_server_runs_without_torch() -> None:
    """Every module of the HTTP process, and what it imports when it starts."""
    code = (
        "import importlib, pkgutil, sys, tokenmill.serve as serve;"
        "names = [each.name for each in pkgutil.walk_packages(serve.__path__, 'tokenmill.serve.')];"
        "[importlib.import_module(name) for name in (*names, 'tokenmill.checkpoint.tokenizer_files')];"
        "sys.exit(len(names) < 20 or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
