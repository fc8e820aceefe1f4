"""The docs name, for every registered method and KV budget, where it differs from its paper (or that there is none)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.engine.kv.budget import BUDGETS
from tokenmill.quantize.gguf_job import METHODS
from tokenmill.quantize.methods import SOLVERS, TRANSFORMS
from tokenmill.quantize.recipe import MIXED

_DOCS = Path(__file__).parents[3] / "docs"
_TITLE = "Where this differs from the paper"


def _rows(file: str) -> dict[str, list[str]]:
    """First cell's names -> the other cells, of the table under the title."""
    text = (_DOCS / file).read_text(encoding="utf-8")
    section = text.split(f"# {_TITLE}\n", 1)[1].split("\n## ", 1)[0]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if "|" in line]
    return {name: row[1:] for row in cells for name in row[0].split("`")[1::2]}


@pytest.mark.parametrize("name", sorted({*TRANSFORMS, *SOLVERS, *METHODS, MIXED}))
def test_every_method_has_a_row(name: str) -> None:
    paper, here = _rows("quantization.md")[name]
    assert paper
    assert len(here) > 20


@pytest.mark.parametrize("name", list(BUDGETS))
def test_every_budget_has_a_row(name: str) -> None:
    paper, here = _rows("kv_tiers.md")[name]
    assert paper
    assert len(here) > 20


def test_no_row_is_of_something_that_is_gone() -> None:
    known = {*TRANSFORMS, *SOLVERS, *METHODS, MIXED, "mxfp4", "mxfp8", "llm.int8"}
    assert set(_rows("quantization.md")) <= known
    assert set(_rows("kv_tiers.md")) == set(BUDGETS)
