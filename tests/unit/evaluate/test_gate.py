"""The gate's rule: what is refused, why, and what would decide it."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

from tokenmill.errors import UserError
from tokenmill.evaluate.divergence import DivergenceReport
from tokenmill.evaluate.gate import GateLimits, default_max_kld, judge, run_gate


def report(ratio: float, stderr: float, **changes: float) -> DivergenceReport:
    values = {field.name: 0.0 for field in fields(DivergenceReport)}
    values |= {"perplexity_ratio": ratio, "perplexity_ratio_stderr": stderr, "tokens": 1000, "top1_agreement": 0.9}
    return DivergenceReport(**(values | changes))  # type: ignore[arg-type]


def test_a_loss_shown_to_be_within_the_limit_passes() -> None:
    found = judge(report(1.005, 0.002), GateLimits(0.01))
    assert found.passed
    assert found.reasons == ()
    assert found.quality_loss == pytest.approx(0.005)
    assert found.perplexity_ratio_low < 1.005 < found.perplexity_ratio_high


def test_a_loss_over_the_limit_is_refused_however_unsure() -> None:
    found = judge(report(1.02, 0.5), GateLimits(0.01))
    assert not found.passed
    assert "grows by 2.00%" in found.reasons[0]


def test_a_loss_that_may_be_over_the_limit_is_refused_and_says_how_much_text_would_tell() -> None:
    found = judge(report(1.005, 0.005), GateLimits(0.01))
    assert not found.passed
    # 1.645 x 0.005 must shrink to 0.005: 2.7 times the tokens
    assert "about 2706 tokens would" in found.reasons[0]
    assert judge(report(1.005, 0.005), GateLimits(0.01, confidence=0.5)).passed


def test_what_is_not_finite_is_refused() -> None:
    assert "3 of 1000 tokens" in judge(report(1.0, 0.0, nan_count=3), GateLimits()).reasons[0]
    nothing = judge(report(math.nan, math.nan, nan_count=1000), GateLimits())
    assert not nothing.passed
    assert len(nothing.reasons) == 1
    assert not judge(report(math.inf, math.nan), GateLimits()).passed


def test_other_limits() -> None:
    found = judge(report(1.0, 0.0, kld_mean=0.2), GateLimits(math.inf, max_kld_mean=0.1, min_top1_agreement=0.95))
    assert len(found.reasons) == 2
    assert judge(report(3.0, 0.1), GateLimits(math.inf)).passed


def test_the_divergence_limit_that_goes_with_a_loss() -> None:
    assert default_max_kld(0.0) == 0.0
    assert default_max_kld(0.01) == pytest.approx(0.0199, abs=1e-4)
    assert default_max_kld(0.05) == pytest.approx(0.0976, abs=1e-4)


@pytest.mark.parametrize(
    "limits",
    [{"max_quality_loss": -0.1}, {"max_quality_loss": math.nan}, {"confidence": 1.0}, {"max_kld_mean": -1.0}],
)
def test_limits_must_make_sense(limits: dict[str, float]) -> None:
    with pytest.raises(UserError, match="give"):
        GateLimits(**limits)


def test_no_text_is_refused_before_a_model_is_looked_for() -> None:
    with pytest.raises(UserError, match="no text"):
        run_gate("no-such-model", "nor-this", [])
