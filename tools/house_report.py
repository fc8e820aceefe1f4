"""Counts the house: files, rooms and floors of folders, import circles, public methods of the KV manager.

    python tools/house_report.py [--tree CHECKOUT]

A room is a folder with Python files below the counted one. Floors are the longest chain of modules inside it in which
each imports the next (a circle counts as one). Circles are groups of modules of the package that import each other,
imports for type checkers and inside functions included. Reads sources only: any checkout can be counted.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

PACKAGE = "tokenmill"
FOLDERS = ("runtime", "kernels", "plan", "engine")
MANAGER = Path(PACKAGE, "engine", "kv", "manager.py")

Graph = dict[str, set[str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[1], help="the checkout to count")
    tree = parser.parse_args().tree.resolve()
    graph = imports(tree)
    print(f"{'folder':10} {'files':>6} {'rooms':>6} {'floors':>7} {'files at its top':>17}")
    for folder in FOLDERS:
        prefix = f"{PACKAGE}.{folder}"
        modules = {name for name in graph if name == prefix or name.startswith(prefix + ".")}
        files = list((tree / PACKAGE / folder).rglob("*.py"))
        rooms = {file.parent for file in files} - {tree / PACKAGE / folder}
        top = [file for file in (tree / PACKAGE / folder).glob("*.py") if file.name != "__init__.py"]
        floors = num_floors({name: graph[name] & modules for name in modules})
        print(f"{folder:10} {len(files):6} {len(rooms):6} {floors:7} {len(top):17}")
    found = [group for group in components(graph) if len(group) > 1]
    print(f"import circles: {len(found)}" + "".join(f"\n  {', '.join(sorted(group))}" for group in found))
    print(f"public methods of the KV manager: {', '.join(public_methods(tree / MANAGER))}")


def imports(tree: Path) -> Graph:
    """By module: the modules of the package that its file names in an import statement."""
    files = {_module(tree, file): file for file in (tree / PACKAGE).rglob("*.py")}
    graph: Graph = {}
    for name, file in files.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        graph[name] = {
            each for each in found if each in files and each != name and not _is_own_package(each, found, files)
        }
    return graph


def _is_own_package(name: str, found: set[str], files: dict[str, Path]) -> bool:
    """`from package import module` names the package too, whose `__init__` it does not use."""
    return files[name].name == "__init__.py" and any(each.startswith(name + ".") for each in found)


def _module(tree: Path, file: Path) -> str:
    parts = file.relative_to(tree).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def components(graph: Graph) -> list[list[str]]:
    """Strongly connected ones, those below first (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[-len(group) :]
            found.append(group)

    for name in graph:
        if name not in index:
            visit(name)
    return found


def num_floors(graph: Graph) -> int:
    level: dict[str, int] = {}
    for group in components(graph):
        below = {other for name in group for other in graph[name]} - set(group)
        height = 1 + max((level[other] for other in below), default=0)
        level |= dict.fromkeys(group, height)
    return max(level.values(), default=0)


def public_methods(file: Path) -> list[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    manager = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "KVManager")
    names = [node.name for node in manager.body if isinstance(node, ast.FunctionDef)]
    public = [name for name in names if not name.startswith("_")]
    return [str(len(public)), *public]


if __name__ == "__main__":
    main()
