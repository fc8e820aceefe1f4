"""Drift between windows of a traffic log, and a watch that proposes and changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tokenmill.bench.traffic_log import LoggedRequest, read_traffic_log
from tokenmill.errors import UserError
from tokenmill.optimize.drift import Thresholds, drifts, stability_index, window_of
from tokenmill.optimize.results import CandidateResult, Outcome
from tokenmill.optimize.watch import PROPOSALS_FILE, STATE_FILE, Proposal, WatchSettings, load_state, watch

DAY = 86400.0


def requests(
    count: int = 400, *, seed: int = 0, rate: float = 1.0, prompt: float = 200.0, shared: int = 0, cached: int = 0
) -> list[LoggedRequest]:
    random, found, unix = Random(seed), [], 1e9
    for number in range(count):
        unix += random.expovariate(rate)
        length = 1 + round(random.lognormvariate(0, 0.5) * prompt)
        blocks = tuple(range(min(shared, length // 16))) + tuple(
            10**6 * (number + 1) + each for each in range(max(0, length // 16 - shared))
        )
        found.append(
            LoggedRequest(unix - 1e9, length, 1 + random.randrange(100), blocks, min(cached, length), arrival_unix=unix)
        )
    return found


def large(before: Sequence[LoggedRequest], now: Sequence[LoggedRequest]) -> list[str]:
    return [each.what for each in drifts(window_of(before), window_of(now)) if each.is_large]


@pytest.mark.parametrize("seed", range(20))
def test_another_day_of_the_same_traffic_is_no_drift(seed: int) -> None:
    assert large(requests(300, seed=seed), requests(300, seed=100 + seed)) == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"prompt": 400.0}, ["prompt length"]),
        ({"rate": 2.0}, ["rate"]),
        ({"shared": 8}, ["shared prefixes"]),
        ({"cached": 100}, ["cache hits"]),
    ],
)
def test_each_kind_of_drift_is_named(changes: dict[str, Any], what: list[str]) -> None:
    assert large(requests(seed=1), requests(seed=2, **changes)) == what


def test_few_requests_say_nothing() -> None:
    assert drifts(window_of(requests(400)), window_of(requests(20, prompt=4000.0))) == []
    with pytest.raises(UserError, match="no traffic"):
        window_of([])


def test_the_stability_index_is_zero_for_equals_and_grows() -> None:
    values = list(range(1000))
    assert stability_index(values, values) == pytest.approx(0.0, abs=1e-9)
    near, far = ([each + shift for each in values] for shift in (50, 300))
    assert 0 < stability_index(values, near) < stability_index(values, far)
    assert stability_index([5] * 100, [5] * 100) == pytest.approx(0.0, abs=1e-9)


@dataclass(frozen=True, slots=True)
class Job:
    """The fields of an OptimizeJob that a watch touches."""

    out: Path
    traffic_log: Path | None = None


def write_log(folder: Path, rows: Sequence[LoggedRequest], name: str = "a") -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"tokenmill_traffic_log": 1})]
    lines += [
        json.dumps(
            {
                "arrival_unix": each.arrival_unix,
                "prompt_tokens": each.prompt_tokens,
                "output_tokens": each.output_tokens,
                "cached_tokens": each.cached_tokens,
            }
        )
        for each in rows
    ]
    (folder / f"traffic-{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def outcome(chosen: str, costs: dict[str, float]) -> Outcome:
    results = [
        CandidateResult(name, name, "float32", 512, dollars_per_million_output=dollars)
        for name, dollars in costs.items()
    ]
    found = Outcome("m", "complete", "", "", {}, "", "", 1.0, "", -0.5, 0.01, "", 0.0, None, [], results)
    found.chosen = next((each for each in results if each.name == chosen), None)
    return found


class Loop:
    """Stands in for `optimize`: answers in turn, remembers what it was asked."""

    def __init__(self, *answers: Outcome | BaseException) -> None:
        self.answers = list(answers)
        self.jobs: list[Any] = []

    def __call__(self, job: Any, say: Callable[[str, float], None]) -> Outcome:
        say("measuring", 0.5)
        self.jobs.append(job)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.fixture
def run_watch(tmp_path: Path) -> Callable[..., tuple[list[Proposal], list[float]]]:
    def go(loop: Loop, rounds: int, now: float = 1e9 + 1000) -> tuple[list[Proposal], list[float]]:
        slept: list[float] = []
        settings = WatchSettings(600.0, 30 * DAY, rounds, Thresholds(min_requests=50))
        told: list[Proposal] = []
        found = watch(
            Job(tmp_path / "out"),  # type: ignore[arg-type]
            tmp_path / "log",
            settings,
            lambda _what, _share: None,
            told.append,
            run=loop,
            clock=lambda: now + sum(slept),
            sleep=slept.append,
        )
        assert told == found
        return found, slept

    return go


def test_a_watch_runs_once_and_again_only_after_a_drift(tmp_path: Path, run_watch: Any) -> None:
    write_log(tmp_path / "log", requests(400, seed=1))
    loop = Loop(outcome("A", {"A": 2.0, "B": 3.0}), outcome("B", {"A": 4.0, "B": 1.0}))
    (first,), slept = run_watch(loop, 3)
    assert (first.to, first.present, first.drift, first.is_change) == ("A", "", (), True)
    assert slept == [600.0, 600.0]
    assert len(loop.jobs) == 1  # the same traffic is not optimized for twice
    later = [
        LoggedRequest(0.0, each.prompt_tokens * 4, each.output_tokens, arrival_unix=each.arrival_unix + 20 * DAY)
        for each in requests(400, seed=2)
    ]
    write_log(tmp_path / "log", later, "b")
    (second,), _ = run_watch(loop, 1, now=1e9 + 20 * DAY + 1000)
    assert second.is_change
    assert (second.present, second.to, second.saving) == ("A", "B", pytest.approx(0.75))
    assert any("prompt length" in each for each in second.drift)
    assert "nothing was changed" in second.words()
    assert "75% cheaper than A" in second.words()
    assert Path(second.report).parent == loop.jobs[1].out
    written = [json.loads(line) for line in (tmp_path / "out" / PROPOSALS_FILE).read_text().splitlines()]
    assert [each["to"] for each in written] == ["A", "B"]


def test_the_loop_sees_the_window_alone(tmp_path: Path, run_watch: Any) -> None:
    old = [LoggedRequest(0.0, 9999, 1, arrival_unix=each.arrival_unix - 100 * DAY) for each in requests(200, seed=3)]
    write_log(tmp_path / "log", [*old, *requests(300, seed=4)])
    loop = Loop(outcome("A", {"A": 1.0}))
    run_watch(loop, 1)
    seen = read_traffic_log(loop.jobs[0].traffic_log)
    assert len(seen) == 300
    assert max(each.prompt_tokens for each in seen) < 9999


def test_a_killed_run_is_resumed_in_its_folder(tmp_path: Path, run_watch: Any) -> None:
    write_log(tmp_path / "log", requests(400, seed=1))
    with pytest.raises(KeyboardInterrupt):
        run_watch(Loop(KeyboardInterrupt()), 1)
    assert load_state(tmp_path / "out").running
    loop = Loop(outcome("A", {"A": 1.0}))
    (found,), _ = run_watch(loop, 1, now=1e9 + 5000)
    assert str(loop.jobs[0].out) in found.report
    assert found.to == "A"
    state = load_state(tmp_path / "out")
    assert (state.running, state.choice) == ("", "A")
    assert state.proven_on is not None


def test_a_choice_that_holds_is_kept_and_none_is_said(tmp_path: Path, run_watch: Any) -> None:
    write_log(tmp_path / "log", requests(400, seed=1))
    run_watch(Loop(outcome("A", {"A": 1.0})), 1)
    write_log(
        tmp_path / "log",
        [LoggedRequest(0.0, 5000, 5, arrival_unix=1e9 + 40 * DAY + each) for each in range(300)],
        "b",
    )
    (kept,), _ = run_watch(Loop(outcome("A", {"A": 1.0})), 1, now=1e9 + 40 * DAY + 400)
    assert not kept.is_change
    assert kept.words().startswith("keep A")
    (tmp_path / "out" / STATE_FILE).write_text("{broken", encoding="utf-8")
    (none,), _ = run_watch(Loop(outcome("nothing", {"A": 1.0})), 1, now=1e9 + 40 * DAY + 400)
    assert "no candidate was chosen" in none.words()


def test_too_little_traffic_starts_nothing(tmp_path: Path, run_watch: Any) -> None:
    write_log(tmp_path / "log", requests(10))
    assert run_watch(Loop(), 1) == ([], [])
    with pytest.raises(UserError, match="interval"):
        WatchSettings(interval_s=0.0)
