"""The size report: folders, files and functions against what pyproject.toml allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.size_report import Limits, Rules, Source, problems, read_source

_FOLDERS = {"tokenmill": 10, "tokenmill/engine": 100, "tokenmill/kernels": 100, "tokenmill/kernels/triton": 100}


def _rules(**exceptions: int) -> Rules:
    named = {name.replace("__", "/") + ".py": lines for name, lines in exceptions.items()}
    return Rules(Limits(40, 6), Limits(60, 15), ("tokenmill/kernels/triton",), _FOLDERS, named)


def test_functions_are_measured_by_their_qualified_names(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "class A:\n    def f(self):\n        def g():\n            pass\n\n\nasync def h(): ...\n"
    )
    found = read_source(tmp_path, tmp_path / "a.py")
    assert (found.path, found.lines) == ("a.py", 7)
    assert found.functions == {"A.f": 3, "A.f.g": 2, "h": 1}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (Source("tokenmill/engine/a.py", 40, {"f": 6}), None),
        (Source("tokenmill/engine/a.py", 41, {}), "a.py has 41 lines, 40 are allowed"),
        (Source("tokenmill/engine/a.py", 20, {"f": 7}), "a.py:f has 7 lines, 6 are allowed"),
        (Source("tokenmill/kernels/triton/a.py", 60, {"f": 15}), None),
        (Source("tokenmill/kernels/a.py", 60, {}), "a.py has 60 lines, 40 are allowed"),
        (Source("tokenmill/types.py", 11, {}), "tokenmill has 11 lines, its budget is 10"),
        (Source("tokenmill/new/a.py", 1, {}), "no folder that has a budget"),
    ],
)
def test_what_is_too_long_is_said(source: Source, problem: str | None) -> None:
    found = problems([source], _rules())
    assert [problem in each for each in found] == [True] if problem else not found


def test_a_folder_counts_all_its_files_but_not_a_part_with_its_own_budget() -> None:
    files = [Source(f"tokenmill/kernels/{number}.py", 30, {}) for number in range(3)]
    assert problems([*files, Source("tokenmill/kernels/triton/a.py", 60, {})], _rules()) == []
    files.append(Source("tokenmill/kernels/b.py", 30, {}))
    assert "tokenmill/kernels has 120 lines" in problems(files, _rules())[0]


def test_an_exception_is_a_cap_and_goes_when_it_is_none() -> None:
    rules = _rules(tokenmill__engine__a=50)
    assert problems([Source("tokenmill/engine/a.py", 50, {})], rules) == []
    assert "50 are allowed" in problems([Source("tokenmill/engine/a.py", 51, {})], rules)[0]
    assert "is none any more" in problems([Source("tokenmill/engine/a.py", 40, {})], rules)[0]
