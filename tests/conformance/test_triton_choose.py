"""The two choosers and the lazy exports of kernels/triton: decided from shapes, so no kernel runs here."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU: test_triton.py runs this file under the interpreter", allow_module_level=True)

from tokenmill.kernels import triton as gpu
from tokenmill.kernels.triton.attention import choose as attention
from tokenmill.kernels.triton.matmul import choose
from tokenmill.kernels.triton.matmul.choose import GEMV, GROUPED, HOPPER, HOPPER_WIDE, LIBRARY, SKINNY, Plan, PlanTable

CPU = torch.device("cpu")


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules as on an H200."""
    for module in (choose, attention):
        monkeypatch.setattr(module, "INTERPRETED", False)
        monkeypatch.setattr(module, "on_hopper", lambda: True)
        monkeypatch.setattr(module, "num_processors", lambda _device: 132)


def kernels(kind: str, rows: int, depth: int, counts: list[int]) -> list[str]:
    return [choose.rule(kind, rows, depth, tokens).kernel for tokens in counts]


@pytest.mark.usefixtures("h200")
def test_the_rule_is_its_table() -> None:
    assert kernels("bf16", 4096, 4096, [1, 2, 16, 17]) == [GEMV, SKINNY, SKINNY, LIBRARY]
    assert kernels("fp8", 4096, 14336, [1, 64, 128, 129]) == [GEMV, SKINNY, SKINNY, LIBRARY]
    assert kernels("int8", 4096, 4096, [65, 256, 257]) == [SKINNY, SKINNY, LIBRARY]
    counts = [1, 32, 64, 65, 128, 129, 256, 257, 512, 513]
    hopper = [HOPPER, HOPPER, HOPPER_WIDE, HOPPER_WIDE, HOPPER, HOPPER]
    assert kernels("int4", 4096, 4096, counts) == [GEMV, GROUPED, GROUPED, *hopper, LIBRARY]
    assert kernels("grouped4", 4096, 4096, [1, 128, 129]) == [GROUPED, GROUPED, LIBRARY]


@pytest.mark.usefixtures("h200")
def test_elsewhere_int4_is_multiplied_as_other_groups_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "on_hopper", lambda: False)
    for tokens in (65, 128, 200, 512):
        assert choose.rule("int4", 28672, 4096, tokens) == choose.rule("grouped4", 28672, 4096, tokens)


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("tokens", [100, 200, 400])
def test_what_the_rule_says_is_among_what_is_measured(tokens: int) -> None:
    measured = choose.candidates("int4", 4096, 4096, tokens)
    assert choose.rule("int4", 4096, 4096, tokens) in measured
    assert (Plan(HOPPER_WIDE) in measured) == (tokens == 200)


def test_what_a_plan_fuses() -> None:
    assert choose.fuses_gate(Plan(GEMV), 8, 1)
    assert not choose.fuses_gate(Plan(GEMV), 7, 1)
    assert choose.fuses_gate(Plan(HOPPER_WIDE), 512, 200)
    assert not choose.fuses_gate(Plan(HOPPER_WIDE), 384, 200), "a tile would have rows of both halves"
    assert choose.fuses_rotary(Plan(GROUPED), 32)
    assert not choose.fuses_rotary(Plan(GROUPED), 33)
    assert not choose.fuses_rotary(Plan(SKINNY), 2)


def test_stored_plans_of_other_kernels_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plans.json"
    monkeypatch.setenv(choose.CACHE_VARIABLE, str(path))
    known = {"kernel": LIBRARY, "tiling": {"rows": 32}}
    entries = {
        "bf16 8x8 1": known,
        "bf16 8x8 2": known | {"kernel": "vector"},
        "bf16 8x8 4": known | {"tiling": {"held": 3}},
    }
    path.write_text(json.dumps({choose._machine(CPU): entries}))
    table = PlanTable(CPU)
    assert table.plan("bf16", 8, 8, 1) == Plan(LIBRARY, choose.Tiling(rows=32))
    for tokens in (2, 4):
        assert table.plan("bf16", 8, 8, tokens) == choose.rule("bf16", 8, 8, tokens)


@pytest.mark.usefixtures("h200")
def test_attention_of_many_rows_on_hopper() -> None:
    pages, queries = torch.empty(2, 2, 16, 64, dtype=torch.bfloat16), torch.empty(3, 512, dtype=torch.bfloat16)
    assert attention.hopper_suits(queries, pages, 0, 0.0)
    assert not attention.hopper_suits(queries, pages, 128, 0.0)
    assert not attention.hopper_suits(queries, pages, 0, 30.0)
    assert not attention.hopper_suits(queries, pages.half(), 0, 0.0)
    assert not attention.hopper_suits(queries, torch.empty(2, 2, 16, 32, dtype=torch.bfloat16), 0, 0.0)


@pytest.mark.usefixtures("h200")
def test_keys_are_split_until_the_gpu_is_full() -> None:
    assert attention.choose_key_splits(8, 100_000, 64, CPU) == attention.MAX_SPLITS
    assert attention.choose_key_splits(8, 1000, 64, CPU) == 4, "none below two tiles, a power of two"
    assert attention.choose_key_splits(600, 100_000, 64, CPU) == 1
    assert attention.splits_beside_prompts(32, 8192, 32, 128) == 1
    assert attention.splits_beside_prompts(32, 64, 32, 128) == 32


def test_exports_are_what_type_checkers_see() -> None:
    """`__getattr__` answers at run time, imports under TYPE_CHECKING the type checker; they must agree."""
    assert gpu.__file__ is not None
    module = ast.parse(Path(gpu.__file__).read_text())
    typed = {
        (str(node.module).removeprefix("tokenmill.kernels.triton."), alias.asname)
        for block in module.body
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == {(home, name) for name, home in gpu._MODULES.items()}
    for name in gpu._MODULES:
        assert getattr(gpu, name) is not None
    found = gpu.find_op("attention")
    assert found is not None
    assert found.__module__.endswith("attention.dense"), "the folder of that name must not hide the op"
    with pytest.raises(AttributeError, match="paged_attentoin"):
        gpu.paged_attentoin  # type: ignore[attr-defined]  # noqa: B018
