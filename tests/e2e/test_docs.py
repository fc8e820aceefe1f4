"""The documentation keeps up with the code: commands parse, Python blocks run, files that are named exist."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tokenmill.cli.main import UsageError, make_app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGE_NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
_CODE = re.compile(r"```[^\n]*\n(.*?)```|((?:^    .*\n)+)|`([^`\n]+)`", re.DOTALL | re.MULTILINE)


def commands(text: str, program: str) -> Iterator[str]:
    """Commands in code that start with `program`: continued lines joined, comments, pipes, redirections and the
    brackets around optional flags removed."""
    for match in _CODE.finditer(text):
        code = next(group for group in match.groups() if group is not None).replace("\\\n", " ")
        for part in re.split(r"\n|&&", code):
            line = re.sub(r"\s(#|->|\||>).*", "", part.strip()).strip()
            if line.startswith(program + " "):
                yield re.sub(r"[\[\]]|\.\.\.", " ", line).strip()


def parse(arguments: list[str]) -> None:
    """Walk to the subcommand and let its own parser read the flags; nothing is run and no value is converted."""
    command: Any = typer.main.get_command(make_app())
    while hasattr(command, "commands") and arguments and arguments[0] in command.commands:
        command, arguments = command.commands[arguments[0]], arguments[1:]
    if hasattr(command, "commands"):
        assert not arguments, f"no such verb: {arguments[0]}"
        return
    context = command.context_class(command, info_name="docs")
    command.make_parser(context).parse_args(list(arguments))


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_every_command_parses(page: Path) -> None:
    for line in commands(page.read_text(encoding="utf-8"), "tokenmill"):
        try:
            parse(shlex.split(line)[1:])
        except UsageError as error:
            pytest.fail(f"{page.name}: `{line}`: {error}")


def test_a_wrong_flag_would_be_seen() -> None:
    with pytest.raises(UsageError):
        parse(["run", "smollm2", "--max-tokns", "3"])
    assert list(
        commands("see `tokenmill run smollm2 --raw` and\n\n    tokenmill pull \\\n  smollm2 # once\n", "tokenmill")
    ) == [
        "tokenmill run smollm2 --raw",
        "tokenmill pull    smollm2",
    ]


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_programs_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for line in commands(text, "python"):
        script = next((word for word in line.split() if word.endswith(".py")), "")
        assert not script or (ROOT / script).is_file(), f"{page.name}: `{line}`"
    for line in commands(text, "pytest"):
        assert (ROOT / line.split()[1]).exists(), f"{page.name}: `{line}`"


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths with a folder and an ending, in the repository or inside the package; upper case is a placeholder."""
    text = re.sub(r"https?://\S+", "", page.read_text(encoding="utf-8"))
    for path in re.findall(r"(?<![\w/.~{*-])((?:\w+/)+[\w.-]*\w\.(?:py|cpp|h|toml|md|json))\b", text):
        if re.search(r"[A-Z]{3}", path.removesuffix("README.md")):
            continue
        places = (ROOT / path, ROOT / "tokenmill" / path, page.parent / path)
        assert any(place.exists() for place in places), f"{page.name} names {path}, which does not exist"


def test_every_type_that_crosses_a_layer_is_listed() -> None:
    tree = ast.parse((ROOT / "tokenmill/types.py").read_text())
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef)} | {"KvLease"}  # of leases.py
    text = (ROOT / "docs/architecture.md").read_text()
    assert defined == set(re.findall(r"`(\w+)`", text[text.index("| Type |") : text.index("## One request")]))
    numbers = ["ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen"]
    assert f"its {numbers[len(defined) - 10]} types" in text


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(python_blocks())))
def test_a_recipe_runs(number: int) -> None:
    done = subprocess.run([sys.executable, "-c", python_blocks()[number]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_benchmark_is_listed() -> None:
    folder = ROOT / "benchmarks"
    listed = set(re.findall(r"\]\(([\w/]+\.py)\)", (folder / "README.md").read_text()))
    assert listed == {str(path.relative_to(folder)) for path in folder.rglob("*.py")}
