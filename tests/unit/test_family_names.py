"""Families are told apart in two places only: the readers of checkpoints and the architectures. Elsewhere code asks a
fact of the description, so that a new family needs no visit there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tokenmill
from tokenmill.checkpoint.configs.families import FAMILIES
from tokenmill.model.architectures import ARCHITECTURES

PACKAGE = Path(tokenmill.__file__).parent
ALLOWED = ("model/architectures/", "checkpoint/")
# Tables of parsers: their keys are the names of styles that users type (vLLM's), of which some are called after a
# family. Which one a model has is read from its chat template, never from its family.
STYLES = ("serve/reasoning/__init__.py", "serve/tools/__init__.py")
# Variables and fields that hold the name of a family, in any spelling that code here uses.
_NAMES = ("architecture", "model_type")
# Words that also name facts of the description: `Recurrent.style`.
_FACTS = {"mamba", "mamba2"}
FILES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if not path.relative_to(PACKAGE).as_posix().startswith(ALLOWED + STYLES)
]


def _strings(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value


def _holds_family(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in _NAMES


def family_tests(source: str) -> list[int]:
    """Lines that compare the name of a family with a text, look it up in a table of texts, or test its beginning."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            texts = [text for side in sides for text in _strings(side)]
            if texts and (any(map(_holds_family, sides)) or set(texts) & set(FAMILIES) - {"llama", *_FACTS}):
                found.append(node.lineno)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            tests_text = node.func.attr in ("startswith", "endswith") and _holds_family(node.func.value)
            if tests_text:
                found.append(node.lineno)
        elif isinstance(node, ast.Match) and _holds_family(node.subject):
            found.append(node.lineno)
        elif isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            if len((keys & {*FAMILIES, *ARCHITECTURES}) - _FACTS) > 1:
                found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    "source",
    [
        'description.architecture == "gemma3"',
        'if d.architecture in ("qwen2", "qwen3"): pass',
        'x = "yes" if model_type != "mistral" else "no"',
        'd.architecture.startswith("gemma")',
        'match d.architecture:\n    case "llama": pass',
        'kind in ("gemma2", "gpt_oss")',
        'TABLE = {"qwen2": 1, "gemma3": 2}',
    ],
)
def test_the_search_finds_what_it_is_for(source: str) -> None:
    assert family_tests(source)


def test_no_family_is_told_apart_elsewhere() -> None:
    found = {str(path.relative_to(PACKAGE)): lines for path in FILES if (lines := family_tests(path.read_text()))}
    assert not found
    assert len(FILES) > 200
