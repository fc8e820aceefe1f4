"""Building artefacts: an interrupted job goes on at its last block, and another job's leftovers are not taken up."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenmill.optimize import builds
from tokenmill.optimize.contender_messages import BuildWeights
from tokenmill.quantize import job as quantize_job


@pytest.fixture
def order(model_path: Callable[[str], Path], tmp_path: Path) -> BuildWeights:
    source = model_path("stories15m")
    return BuildWeights(source, tmp_path / "out", "", "rtn", 4, False, 4, 32, 1, "cpu", 600.0)


def _count_blocks(monkeypatch: pytest.MonkeyPatch, stop_at: int) -> list[int]:
    """The blocks that are quantized from now on; the process "is killed" before block `stop_at`."""
    done: list[int] = []
    work = quantize_job._do_block

    def counted(prepared: Any, recipe: Any, workspace: Any, index: int, *rest: Any) -> None:
        if index == stop_at:
            raise KeyboardInterrupt
        work(prepared, recipe, workspace, index, *rest)
        done.append(index)

    monkeypatch.setattr(quantize_job, "_do_block", counted)
    return done


def test_an_interrupted_build_resumes_at_its_last_block(order: BuildWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        first = _count_blocks(patch, stop_at=4)
        with pytest.raises(KeyboardInterrupt):
            builds.build_weights(order)
    assert first == [0, 1, 2, 3]
    assert not order.path.exists()
    second = _count_blocks(monkeypatch, stop_at=-1)
    built = builds.build_weights(order)
    assert second == [4, 5]
    assert (order.path / "config.json").is_file()
    assert built.forecast > 0
    assert 4 < built.bits_per_weight < 5


def test_leftovers_of_another_job_are_discarded(order: BuildWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    leftovers = order.path.with_name("out.partial")
    leftovers.mkdir()
    (leftovers / "journal.json").write_text('{"key": "of another torch"}')
    (leftovers / "block-00000.safetensors").write_bytes(b"old")
    blocks = _count_blocks(monkeypatch, stop_at=-1)
    builds.build_weights(order)
    assert blocks == [0, 1, 2, 3, 4, 5]
    shutil.rmtree(order.path)
