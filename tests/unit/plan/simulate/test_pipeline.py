"""Steps on the shared stages of a pipeline: equal ones overlap fully, a long one delays those behind it."""

from __future__ import annotations

import pytest

from tokenmill.plan.simulate.pipeline import Pipeline


def ends(pipeline: Pipeline, steps: list[float], rounds: int) -> list[list[float]]:
    """When each loop's step ends, round by round; every loop begins its next step when its last one ended."""
    begin = [0.0] * len(steps)
    found = []
    for _ in range(rounds):
        begin = [pipeline.end(now, ms) for now, ms in zip(begin, steps, strict=True)]
        found.append(begin)
    return found


def test_one_loop_takes_as_long_as_without_stages() -> None:
    assert ends(Pipeline(4), [8.0], 3) == [[8.0], [16.0], [24.0]]


def test_as_many_equal_steps_as_stages_keep_all_of_them_busy() -> None:
    rounds = ends(Pipeline(4), [8.0] * 4, 10)
    assert rounds[0] == [8.0, 10.0, 12.0, 14.0]  # filling the pipeline
    assert rounds[-1][0] - rounds[-2][0] == pytest.approx(8.0)


def test_all_loops_wait_for_the_slowest() -> None:
    rounds = ends(Pipeline(4), [8.0, 8.0, 40.0, 8.0], 10)
    for loop in range(4):
        assert rounds[-1][loop] - rounds[-2][loop] == pytest.approx(40.0)
