"""What measurements so far rule out: the far slower and the too coarse, until those that were better do not pass."""

from __future__ import annotations

import pytest

from tokenmill.optimize.evidence import Limits
from tokenmill.optimize.pruning import Pruning
from tokenmill.optimize.results import HARMED, UNLIKELY, UNTRIED, CandidateResult, Prediction, Quality

_LIMITS = Limits(kld=0.02)  # 0.03 on the short text


def _candidate(name: str, bits: float, speedup: float = 2.0, divergence: float | None = None) -> CandidateResult:
    result = CandidateResult(name, name, "float32", 512)
    result.prediction = Prediction(speedup, 1, 0.0, 0.01, "injected", bits=bits)
    if divergence is not None:
        result.divergence = Quality(0.1, 0.0, 0.2, divergence, 1.0, 0.9, 10.0, 11.0, 1000, 0, 0.1)
    return result


def _pruning(*results: CandidateResult) -> Pruning:
    return Pruning({each.name: each for each in results}, None, _LIMITS, lambda name: name)


@pytest.mark.parametrize(
    ("bits", "divergence", "ruled_out"),
    [
        (4.5, 0.36, True),  # four times what the best rounding to as many bits makes good: one bit more is needed
        (4.4, 0.36, True),
        (5.6, 0.36, False),
        (4.5, 0.08, False),  # another method with as many bits may keep the limit
        (3.0, 0.02, False),  # the other one passed
    ],
)
def test_a_divergence_rules_out_fewer_bits(bits: float, divergence: float, ruled_out: bool) -> None:
    own = _candidate("own", bits)
    pruning = _pruning(_candidate("other", 4.5, divergence=divergence), own)
    reason = pruning.hopeless(own, [])
    assert bool(reason) == ruled_out
    assert pruning.too_coarse == ({"own"} if ruled_out else set())
    if ruled_out:
        assert reason == f"other diverges by {divergence} with 4.5 bits a weight, this has {bits}"


def test_unknown_bits_rule_out_nothing() -> None:
    own = _candidate("own", 0.0)
    assert not _pruning(_candidate("other", 4.5, divergence=9.0), own).hopeless(own, [])


def test_the_coarse_come_back_only_if_nothing_is_proven_and_the_slow_if_they_are_near() -> None:
    coarse, slow, fast = _candidate("coarse", 3.0, 3.0), _candidate("slow", 8.0, 1.0), _candidate("fast", 8.0, 2.0)
    measured = [_candidate(name, 8.0, 2.0) for name in ("a", "b", "c")]
    harmed = _candidate("harmed", 4.0, divergence=1.0)
    harmed.verdict = HARMED
    pruning = _pruning(coarse, slow, fast, harmed, *measured)
    for each in (coarse, slow, fast):
        each.reason = pruning.hopeless(each, measured)
        each.verdict = UNLIKELY if each.reason else UNTRIED
    assert (pruning.too_coarse, pruning.too_slow) == ({"coarse"}, {"slow"})
    assert pruning.reopen([fast]) == []
    assert pruning.reopen([]) == ["coarse", "slow"]
    assert (coarse.verdict, coarse.reason) == (UNTRIED, "")
    assert not pruning.hopeless(coarse, measured)
    assert pruning.reopen([]) == [], "each comes back once"
