"""The loop's choice where the truth is known: the cheapest that keeps the limits, to within one percent, whatever the
noise; a run that was killed anywhere goes on and chooses the same; failures cost no more than their time limit."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.optimize.injected import BASELINE, TIME_LIMIT, Clock, InjectedLaboratory, InjectedPredictor, Truth
from tokenmill.optimize.budget import TimeBudget
from tokenmill.optimize.contender import NoAnswerError
from tokenmill.optimize.evidence import Limits
from tokenmill.optimize.loop import Effort, Search
from tokenmill.optimize.results import CHOSEN, FAILED, HARMED, PASSED, TIED, CandidateResult, Prediction
from tokenmill.optimize.space import KVChoice, Space
from tokenmill.optimize.store import Store
from tokenmill.optimize.trial import Trials

_LIMIT = 0.01


def _weights(seed: int) -> dict[str, Truth]:
    """Sixteen candidates: cheap ones that harm, good ones of near costs, some that crash, hang, are slow to make or
    miss the latency."""
    draw = random.Random(seed)
    found = {BASELINE: Truth(1.0)}
    for number in range(16):
        harmful = draw.random() < 0.3
        found[f"w{number:02}"] = Truth(
            cost=draw.uniform(0.28, 0.40 if harmful else 0.55),
            loss=draw.uniform(0.011, 0.05) if harmful else draw.uniform(0.0, 0.0095),
            build_s=draw.choice([1.0, 3.0, 40.0]),
            latency_ok=draw.random() > 0.2,
            fails=draw.choice(["build", "pair", "check", "prove"]) if draw.random() < 0.15 else "",
            hangs=draw.random() < 0.5,
        )
    return found


def _kv(seed: int) -> dict[str, Truth]:
    draw = random.Random(1000 + seed)
    return {
        "float32": Truth(1.0),
        "half": Truth(draw.uniform(0.93, 1.02), 0.0001),
        "byte": Truth(draw.uniform(0.85, 1.05), draw.uniform(0.0005, 0.004)),
        "broken": Truth(0.5, fails="pair"),
    }


def _search(lab: InjectedLaboratory, seconds: float = 30_000.0, objectives: bool = True) -> Search:
    names = [name for name in lab.weights if name != BASELINE]
    space = Space(
        "cpu",
        names,
        [BASELINE],
        [KVChoice(name, is_float=name == "float32") for name in lab.kv],
        [512],
        calibrated=frozenset(name for name in names if lab.weights[name].build_s > 30),
    )
    return Search(
        lab=lab,
        store=lab.store,
        space=space,
        effort=Effort(seconds, max_runs=4000),
        limits=Limits(_LIMIT),
        predictor=InjectedPredictor(lab.weights, lab.seed),
        say=lambda *_: None,
        objectives=objectives,
        budget=TimeBudget(seconds, lab.clock),
    )


def _lab(folder: Path, seed: int) -> InjectedLaboratory:
    return InjectedLaboratory(_weights(seed), _kv(seed), Store(folder, "k"), _LIMIT, seed)


def _allowed_costs(lab: InjectedLaboratory) -> dict[tuple[str, str], float]:
    """Of every combination that works and keeps the limits."""
    return {
        (weights, kv): own.cost * pages.cost
        for weights, own in lab.weights.items()
        for kv, pages in lab.kv.items()
        if weights != BASELINE
        and not own.fails
        and not pages.fails
        and own.loss + pages.loss <= _LIMIT
        and own.latency_ok
        and pages.latency_ok
    }


@pytest.mark.parametrize("first", range(0, 100, 10))
def test_the_choice_is_the_best_that_keeps_the_limits(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.optimize.store.write_json", lambda *_: None)
    for seed in range(first, first + 10):
        lab = _lab(tmp_path / str(seed), seed)
        search = _search(lab)
        search.run()
        allowed = _allowed_costs(lab)
        chosen = search.results[search.chosen]
        assert (chosen.weights, chosen.kv) in allowed, f"seed {seed}: {search.chosen} breaks a limit"
        best = min(allowed, key=allowed.__getitem__)
        excess = allowed[chosen.weights, chosen.kv] / allowed[best] - 1
        assert excess <= 0.01, f"seed {seed}: {search.chosen} costs {excess:.1%} more than {best}"


def test_what_is_cheaper_and_was_left_unproven_is_named(tmp_path: Path) -> None:
    """There is time to look at a cheaper KV dtype and none to prove it."""
    weights = {BASELINE: Truth(1.0), "w0": Truth(0.4, 0.001), "w1": Truth(0.41, 0.001)}
    kv = {"float32": Truth(1.0), "byte": Truth(0.8, check_s=400.0)}
    lab = InjectedLaboratory(weights, kv, Store(tmp_path, "k"), _LIMIT, 1, noise=0.01)
    search = _search(lab, seconds=400.0, objectives=False)
    search.run()
    assert search.results[search.chosen].kv == "float32"
    assert search.results[search.chosen].quality is not None
    assert search.out_of_time
    assert "w0/byte/512" in search.unproven
    assert search.results["w0/byte/512"].reason == "no time was left to prove its quality"


def test_four_minutes_time_eight_candidates_and_prove_three(tmp_path: Path) -> None:
    """A small model that few types spare, with the durations that its measurements have on two cores."""
    weights = {BASELINE: Truth(1.0), "q8": Truth(0.42, 0.004, bits=8.5), "q6": Truth(0.425, 0.006, bits=6.6)}
    weights |= {f"m8-{n}": Truth(0.8 + 0.01 * n, 0.003, build_s=4.0, bits=8.1) for n in range(6)}
    weights |= {f"q5-{n}": Truth(0.43 + 0.002 * n, 0.11, bits=5.5) for n in range(6)}
    weights |= {f"q4-{n}": Truth(0.44, 0.13 + 0.05 * n, bits=4.5) for n in range(6)}
    weights |= {f"i{n}": Truth(0.43, 0.05 + 0.01 * n, build_s=40.0, bits=5.5) for n in range(6)}
    kv = {"float32": Truth(1.0)} | {f"kv{n:02}": Truth(0.99 + 0.01 * n, 0.0002) for n in range(20)}
    lab = InjectedLaboratory(weights, kv, Store(tmp_path, "k"), _LIMIT, 1, noise=0.02)
    search = replace(_search(lab, seconds=240.0, objectives=False), effort=Effort(240.0))
    search.run()
    timed = [each for each in search.results.values() if each.speed]
    assert len(timed) >= 8
    assert len([each for each in timed if each.quality and each.verdict in (CHOSEN, TIED, PASSED)]) >= 3
    assert lab.clock.now <= 250
    coarse = [each for each in search.results.values() if "bits a weight" in each.reason]
    assert {each.name[0] for each in coarse} == {"q", "i"}
    assert all(each.divergence is None for each in coarse), "not even checked"
    assert search.results[search.chosen].weights in ("q8", "q6")
    cycles = {call.rsplit(" ", 1)[1] for call in lab.calls if call.startswith("cycle")}
    assert len(cycles) <= 12


def test_where_nothing_passes_even_the_coarse_are_tried_once(tmp_path: Path) -> None:
    weights = {BASELINE: Truth(1.0)} | {f"w{n}": Truth(0.3 + 0.02 * n, 0.9, bits=3.0 + n / 8) for n in range(8)}
    lab = InjectedLaboratory(weights, {"float32": Truth(1.0)}, Store(tmp_path, "k"), _LIMIT, 1)
    search = _search(lab, objectives=False)
    search.run()
    assert not search.chosen
    assert {each.verdict for each in search.results.values()} == {HARMED}


def test_the_final_ends_when_it_is_settled_and_says_what_it_leaves_open(tmp_path: Path) -> None:
    def final(other: float, noise: float, seed: int) -> tuple[Search, int]:
        weights = {BASELINE: Truth(1.0), "a": Truth(0.4, 0.001), "b": Truth(other, 0.002)}
        store = Store(tmp_path / f"{other} {noise} {seed}", "k")
        lab = InjectedLaboratory(weights, {"float32": Truth(1.0)}, store, _LIMIT, seed, noise=noise)
        search = replace(_search(lab, objectives=False), effort=Effort(30_000.0))
        search.run()
        return search, len({call.rsplit(" ", 1)[1] for call in lab.calls if call.startswith("cycle")})

    clear, cycles = final(0.44, 0.001, 1)
    assert (clear.chosen, clear.tied, clear.margin, cycles) == ("a", ["a"], 0.0, 5)
    quiet, cycles = final(0.402, 0.001, 1)
    assert (quiet.chosen, quiet.tied) == ("a", ["a", "b"])
    assert cycles <= 12
    assert quiet.margin < 0.02
    noisy = [final(0.402, 0.05, seed) for seed in range(8)]
    unsettled = [search for search, cycles in noisy if cycles == 12]
    assert max(cycles for _, cycles in noisy) == 12
    assert len(unsettled) >= 4
    assert all(search.margin > 0.01 for search in unsettled), "a percent is not claimed"


class _Killed(BaseException):
    """The process ends here."""


def test_a_run_killed_at_any_step_goes_on_and_chooses_the_same(tmp_path: Path) -> None:
    def fresh(folder: Path) -> InjectedLaboratory:
        weights = {BASELINE: Truth(1.0), "bad": Truth(0.2, 0.05), "crash": Truth(0.3, fails="pair")}
        weights |= {f"w{n}": Truth(0.3 + 0.05 * n, 0.002) for n in range(4)}
        kv = {"float32": Truth(1.0), "byte": Truth(0.8, 0.003)}
        return InjectedLaboratory(weights, kv, Store(folder, "k"), _LIMIT, seed=3, noise=0.01)

    whole = fresh(tmp_path / "whole")
    expected = _search(whole)
    expected.run()
    steps = [call for call in whole.calls if not call.startswith("build")]
    assert len(steps) > 20
    for number in range(0, len(steps), 6):
        folder = tmp_path / str(number)
        lab = fresh(folder)
        left: list[bytes] = []

        def kill(
            _what: str,
            lab: InjectedLaboratory = lab,
            number: int = number,
            folder: Path = folder,
            left: list[bytes] = left,
        ) -> None:
            if sum(not call.startswith("build") for call in lab.calls) == number:
                left.append((folder / "measurements.json").read_bytes())  # a kill leaves the file as it is now
                raise _Killed

        lab.before = kill
        with pytest.raises(_Killed):
            _search(lab).run()
        (folder / "measurements.json").write_bytes(left[0])
        again = fresh(folder)
        search = _search(again)
        search.run()
        assert search.chosen == expected.chosen, f"killed before {steps[number]}"
        assert not _kept(lab) & _kept(again), "what was measured is not measured again"


def _kept(lab: InjectedLaboratory) -> set[str]:
    """Measurements that are stored one by one; a cycle of the final is stored as a whole, files stay where they are."""
    return {call for call in lab.calls if not call.startswith(("build", "cycle"))}


def test_a_candidate_that_kills_the_process_twice_is_given_up(tmp_path: Path) -> None:
    for _ in range(2):
        store = Store(tmp_path, "k")
        store._mark("w0")  # the process died here
        lab = InjectedLaboratory(
            {BASELINE: Truth(1.0), "w0": Truth(0.3), "w1": Truth(0.4)}, {"float32": Truth(1.0)}, store, _LIMIT, 1
        )
        search = _search(lab)
        search.run()
    assert search.results["w0"].verdict == FAILED
    assert "killed 2 times" in search.results["w0"].reason
    assert search.chosen == "w1"


@pytest.mark.parametrize("what", ["build", "check", "pair", "prove", "cycle"])
def test_a_candidate_that_hangs_costs_its_time_limit_once(what: str, tmp_path: Path) -> None:
    def run(folder: Path, hanging: Truth) -> tuple[Search, Clock]:
        weights = {BASELINE: Truth(1.0), "w0": hanging, "w1": Truth(0.4)}
        lab = InjectedLaboratory(weights, {"float32": Truth(1.0)}, Store(folder, "k"), _LIMIT, 1)
        search = _search(lab, objectives=False)
        search.run()
        return search, lab.clock

    search, clock = run(tmp_path / "hangs", Truth(0.3, fails=what, hangs=True))
    assert search.results["w0"].verdict == FAILED
    assert search.results["w0"].reason.endswith("it hangs")
    assert search.results["w1"].verdict == CHOSEN
    _, quick = run(tmp_path / "harms", Truth(0.3, loss=0.5))
    assert clock.now - quick.now <= TIME_LIMIT + 20
    _, again = run(tmp_path / "hangs", Truth(0.3, fails=what, hangs=True))
    assert again.now < TIME_LIMIT, "it is not tried again"


def test_weights_and_kv_share_one_limit(tmp_path: Path) -> None:
    """Each alone is within the limit, both together are not: the next weights take the KV dtype instead."""
    weights = {BASELINE: Truth(1.0), "w0": Truth(0.40, 0.008), "w1": Truth(0.42, 0.002)}
    kv = {"float32": Truth(1.0), "byte": Truth(0.8, 0.005)}
    lab = InjectedLaboratory(weights, kv, Store(tmp_path, "k"), _LIMIT, 1, noise=0.01)
    search = _search(lab, objectives=False)
    search.run()
    assert search.chosen == "w1/byte/512"
    assert search.results["w0/byte/512"].verdict == "harmed"


def test_equal_kernels_are_decided_by_quality_not_by_noise(tmp_path: Path) -> None:
    for seed in range(5):
        weights = {BASELINE: Truth(1.0), "a": Truth(0.4, 0.004), "b": Truth(0.4, 0.001)}
        lab = InjectedLaboratory(weights, {"float32": Truth(1.0)}, Store(tmp_path / str(seed), "k"), _LIMIT, seed)
        predict = InjectedPredictor(weights, seed, error=0.0).predict
        search = replace(_search(lab, objectives=False), predictor=_SameKernels(predict))
        search.run()
        assert search.chosen == "b"
        assert search.tied == ["a", "b"]


class _SameKernels:
    def __init__(self, predict: Callable[[str], Prediction]) -> None:
        self._predict = predict

    def predict(self, weights: str) -> Prediction:
        return replace(self._predict(weights), speed_class="all Q4_0")

    def settle(self, baseline: str, speedups: Mapping[str, float]) -> None:
        pass


def test_the_unquantized_weights_are_the_choice_where_nothing_is_cheaper(tmp_path: Path) -> None:
    weights = {BASELINE: Truth(1.0), "w0": Truth(1.2, 0.001), "w1": Truth(0.3, 0.5)}
    lab = InjectedLaboratory(weights, {"float32": Truth(1.0)}, Store(tmp_path, "k"), _LIMIT, 1, noise=0.01)
    search = _search(lab)
    search.run()
    assert search.baseline is not None
    assert search.results[search.chosen] is search.baseline
    assert search.results["w0"].verdict == PASSED
    assert search.results["w0"].reason == f"costs more than {search.baseline.name}"


@pytest.mark.parametrize(("seconds", "attempts"), [(300.0, 1), (600.0, 2)])
def test_what_was_given_up_for_its_time_is_tried_again_in_a_longer_run(
    seconds: float, attempts: int, tmp_path: Path
) -> None:
    calls = []

    def slow() -> None:
        calls.append(1)
        raise NoAnswerError("no answer in 100 s while measuring quality")

    for budget in (300.0, seconds):
        lab = _lab(tmp_path, 1)
        result = CandidateResult("w0", "w0", "float32", 512)
        trials = Trials(lab, lab.store, TimeBudget(budget, lab.clock), Limits(_LIMIT))
        assert not trials.attempt(result, slow)
        assert (result.verdict, result.reason[:9]) == (FAILED, "no answer")
    assert len(calls) == attempts
