"""Lines by folder against the budgets in pyproject.toml ([tool.tokenmill.size]), and the longest files and functions.

`make lint` runs it: it prints the table and fails when a folder is over its budget, or a file or function over its
limit without being listed as an exception. A change that needs more lines raises the number in pyproject.toml, where a
reviewer sees it. All lines count: blank ones and comments too.

    python tools/size_report.py            the table; exit 1 with the reasons if something is too long
    python tools/size_report.py --suggest  the [tool.tokenmill.size] tables that the tree as it is would just keep to
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_SUFFIXES = (".py", ".cpp", ".h")
_PACKAGE = "tokenmill"
_ROUND = 100  # suggested budgets are rounded up to this


@dataclass(frozen=True)
class Limits:
    file_lines: int
    function_lines: int


@dataclass(frozen=True)
class Rules:
    """[tool.tokenmill.size]: limits of files and functions, budgets by folder, exceptions by `path` or
    `path:function`."""

    plain: Limits
    kernels: Limits
    kernel_folders: tuple[str, ...]
    folders: dict[str, int]
    exceptions: dict[str, int]

    @classmethod
    def read(cls, pyproject: Path) -> Rules:
        found: dict[str, Any] = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["tokenmill"]["size"]
        return cls(
            Limits(found["file_lines"], found["function_lines"]),
            Limits(found["kernel_file_lines"], found["kernel_function_lines"]),
            tuple(found["kernel_folders"]),
            found["folders"],
            found.get("exceptions", {}),
        )

    def limits(self, path: str) -> Limits:
        return self.kernels if any(path.startswith(folder + "/") for folder in self.kernel_folders) else self.plain

    def folder(self, path: str) -> str | None:
        """The longest budgeted folder that holds the file. The package's own budget is for the files directly in it: a
        new folder needs one of its own."""
        holders = [folder for folder in self.folders if path.startswith(folder + "/")]
        found = max(holders, key=len, default=None)
        return None if found == _PACKAGE and path.count("/") > 1 else found


@dataclass(frozen=True)
class Source:
    path: str
    lines: int
    functions: dict[str, int]  # qualified name -> lines, Python only


def read_sources(root: Path) -> list[Source]:
    folders = ("tokenmill", "csrc", "tests", "benchmarks", "examples", "tools")
    files = sorted(file for folder in folders for file in (root / folder).rglob("*") if file.suffix in _SUFFIXES)
    return [read_source(root, file) for file in files]


def read_source(root: Path, file: Path) -> Source:
    text = file.read_text(encoding="utf-8")
    functions = dict(_functions(ast.parse(text))) if file.suffix == ".py" else {}
    return Source(file.relative_to(root).as_posix(), len(text.splitlines()), functions)


def _functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert child.end_lineno is not None
            yield prefix + child.name, child.end_lineno - child.lineno + 1
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def folder_sizes(sources: list[Source], rules: Rules) -> dict[str, tuple[int, int]]:
    """Budgeted folder -> files and lines; a sub-folder with a budget of its own is not counted in its parent."""
    sizes = dict.fromkeys(rules.folders, (0, 0))
    for source in sources:
        folder = rules.folder(source.path)
        if folder is not None:
            files, lines = sizes[folder]
            sizes[folder] = files + 1, lines + source.lines
    return sizes


def long_parts(sources: list[Source], rules: Rules) -> Iterator[tuple[str, int, int]]:
    """Files and functions over the general limit: `path` or `path:function`, lines, limit."""
    for source in sources:
        limits = rules.limits(source.path)
        if source.lines > limits.file_lines:
            yield source.path, source.lines, limits.file_lines
        for name, lines in source.functions.items():
            if lines > limits.function_lines:
                yield f"{source.path}:{name}", lines, limits.function_lines


def problems(sources: list[Source], rules: Rules) -> list[str]:
    found = []
    for folder, (_, lines) in folder_sizes(sources, rules).items():
        if lines > rules.folders[folder]:
            budget = rules.folders[folder]
            found.append(f"{folder} has {lines} lines, its budget is {budget}: shorten it or raise the budget")
    for source in sources:
        if rules.folder(source.path) is None:
            found.append(f"{source.path} lies in no folder that has a budget: add one")
    long = {name: (lines, limit) for name, lines, limit in long_parts(sources, rules)}
    for name, (lines, limit) in long.items():
        allowed = rules.exceptions.get(name, limit)
        if lines > allowed:
            found.append(f"{name} has {lines} lines, {allowed} are allowed: split it")
    for name in rules.exceptions.keys() - long.keys():
        found.append(f"{name} is listed as an exception and is none any more: remove the line")
    return found


def print_table(sources: list[Source], rules: Rules) -> None:
    print(f"{'folder':32} {'files':>6} {'lines':>7} {'budget':>7}  used")
    total_files = total_lines = 0
    for folder, (files, lines) in folder_sizes(sources, rules).items():
        budget = rules.folders[folder]
        print(f"{folder:32} {files:6} {lines:7} {budget:7}  {lines / budget:4.0%}")
        total_files, total_lines = total_files + files, total_lines + lines
    print(f"{'all':32} {total_files:6} {total_lines:7} {sum(rules.folders.values()):7}")


def print_suggestion(sources: list[Source], rules: Rules) -> None:
    print("[tool.tokenmill.size.folders]")
    for folder, (_, lines) in folder_sizes(sources, rules).items():
        print(f'"{folder}" = {-(-lines // _ROUND) * _ROUND}')
    print("\n[tool.tokenmill.size.exceptions]")
    for name, lines, _ in long_parts(sources, rules):
        print(f'"{name}" = {lines}')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suggest", action="store_true", help="print budgets that fit the tree as it is")
    arguments = parser.parse_args()
    rules, sources = Rules.read(ROOT / "pyproject.toml"), read_sources(ROOT)
    if arguments.suggest:
        print_suggestion(sources, rules)
        return 0
    print_table(sources, rules)
    found = problems(sources, rules)
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
