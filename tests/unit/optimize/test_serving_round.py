"""What the serving path adds: goodput at the sustained rate decides, and the stored file is measured as today."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.optimize.injected import BASELINE, InjectedLaboratory, InjectedPredictor, Truth
from tokenmill.optimize.arrivals import Arrivals
from tokenmill.optimize.budget import TimeBudget
from tokenmill.optimize.candidates import STORED
from tokenmill.optimize.evidence import Limits
from tokenmill.optimize.loop import Effort, Search
from tokenmill.optimize.rate_search import likely_scale
from tokenmill.optimize.results import CandidateResult, Latency, Percentiles, Sustained, saving
from tokenmill.optimize.serving_round import ServingRound
from tokenmill.optimize.space import KVChoice, Space
from tokenmill.optimize.store import Store

_FLAT = Percentiles(10, 10, 10, 10, 10)


def _latency(goodput: float) -> Latency:
    return Latency(10, 0, 1.0, 10.0, _FLAT, _FLAT, _FLAT, 100.0, goodput, 1.0, True)


def _search(folder: Path, stored: float, objectives: bool) -> Search:
    weights = {BASELINE: Truth(1.0), STORED: Truth(stored), "w0": Truth(0.5), "w1": Truth(0.6)}
    lab = InjectedLaboratory(weights, {"float32": Truth(1.0)}, Store(folder, "k"), 0.01, 1, noise=0.01)
    return Search(
        lab=lab,
        store=lab.store,
        space=Space("cpu", ["w0", "w1"], [BASELINE], [KVChoice("float32", is_float=True)], [512]),
        effort=Effort(30_000.0),
        limits=Limits(0.01),
        predictor=InjectedPredictor(weights, 1),
        say=lambda *_: None,
        objectives=objectives,
        measures_today=True,
        budget=TimeBudget(30_000.0, lab.clock),
    )


def test_the_stored_file_is_what_is_served_today(tmp_path: Path) -> None:
    search = _search(tmp_path, stored=1.25, objectives=False)
    search.run()
    assert search.today is not None
    assert search.today.name == STORED
    assert search.today.speed is not None
    assert search.today.speed.cost_ratio == pytest.approx(1.25, rel=0.05)
    assert STORED not in search.results, "it is a reference, not a candidate"
    found = saving(search.results[search.chosen], search.today, in_objective=False)
    assert found is not None
    assert found.share == pytest.approx(1 - 0.5 / 1.25, abs=0.03)


def test_references_and_the_choice_have_the_rate_they_sustain(tmp_path: Path) -> None:
    search = _search(tmp_path, stored=1.25, objectives=True)
    search.run()
    chosen = search.results[search.chosen]
    for result in (search.baseline, search.today, chosen):
        assert result is not None
        assert result.sustained is not None
        assert result.goodput_range is not None
    found = saving(chosen, search.baseline, in_objective=True)
    assert found is not None
    assert found.share == pytest.approx(0.5)
    assert found.low is not None


def test_finalists_that_sustain_less_are_dropped() -> None:
    results = [CandidateResult(name, name, "float32", 512) for name in ("a", "b", "c")]
    for result, goodput in zip(results, (100.0, 97.0, 80.0), strict=True):
        result.latency, result.sustained = _latency(10.0), _latency(goodput)
    kept = ServingRound(trials=None).with_most_goodput(results)  # type: ignore[arg-type]
    assert [each.name for each in kept] == ["a", "b"]
    assert "80 tokens/s" in results[2].reason


def test_a_rate_whose_upper_end_is_unknown_has_no_range() -> None:
    assert Sustained(_latency(5.0), 5.0, math.inf).range is None
    assert Sustained(_latency(5.0), 5.0, 6.0).range == (5.0, 6.0)


def test_the_search_starts_below_the_throughput() -> None:
    arrivals = Arrivals.poisson([[1]] * 10, [20] * 10, 2.0)
    assert 0.4 * 50 < likely_scale(2000.0, arrivals) < 50  # 100 requests/s over 2


def test_requests_at_once_fill_every_slot() -> None:
    arrivals = Arrivals.poisson([[number] for number in range(3)], [4] * 3, 1.0, vocab_size=100)
    waiting = arrivals.at_once(8)
    assert waiting.times_s == (0.0,) * 8
    assert len(waiting.prompts) == len(waiting.output_lens) == 8
    assert len({tuple(prompt) for prompt in waiting.prompts}) == 8, "repeated requests send other tokens"
    assert replace(waiting, words="") == replace(arrivals.at_once(8), words="")
