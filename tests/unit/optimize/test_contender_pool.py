"""Which child of a laboratory is given to whom, with children that compute nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tokenmill.config import EngineConfig
from tokenmill.optimize import contender_pool
from tokenmill.optimize.contender_messages import Done, Load, Loaded
from tokenmill.optimize.contender_pool import ContenderPool, ResourceLimits


class Child:
    def __init__(self, _log: Path) -> None:
        self.memory_limit = 0

    def ask(self, command: Any, _answer: type, _seconds: float, _doing: str) -> Any:
        return Loaded(1, 0.0) if isinstance(command, Load) else Done()

    def is_running(self) -> bool:
        return True


def test_judgements_go_to_the_child_that_judged_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(contender_pool, "Contender", Child)
    pool = ContenderPool(tmp_path / "log", "cpu", ResourceLimits())
    engines = [pool.engine(name, ["first", "second"], tmp_path, 1, EngineConfig()) for name in ("first", "second")]
    judge = pool.idle(judging=True)
    assert judge not in engines
    pool.release_all()
    assert pool.idle(judging=True) is judge
    assert pool.idle() in engines
    assert pool.engine("third", ["third"], tmp_path, 1, EngineConfig()) in engines
