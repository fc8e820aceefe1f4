"""What the planner rules out before anything is made, and why."""

from __future__ import annotations

from tokenmill.optimize.predict import rank_candidates, too_harmful, too_slow
from tokenmill.optimize.results import Prediction


def _expected(speedup: float, low: float, high: float) -> Prediction:
    return Prediction(speedup, 1, low, high, "")


def test_reasons_to_drop() -> None:
    predictions = {
        "good": _expected(3.0, 0.0, 0.002),
        "harmful": _expected(3.5, 0.2, 0.4),
        "slow": _expected(0.5, 0.0, 0.0),
        "dominated": _expected(2.0, 0.005, 0.01),
        "close": _expected(2.9, 0.005, 0.01),
    }
    assert too_slow("good", predictions) == ""
    assert too_harmful(predictions["good"], 0.01) == ""
    assert "published losses" in too_harmful(predictions["harmful"], 0.01)
    assert "slower than the baseline" in too_slow("slow", predictions)
    assert "good is predicted to be faster" in too_slow("dominated", predictions)
    assert too_slow("close", predictions) == ""  # within the prediction's error


def test_order_of_trials() -> None:
    predictions = {
        "risky": _expected(4.0, 0.02, 0.1),
        "safe": _expected(3.0, 0.0, 0.001),
        "fast": _expected(3.5, 0.001, 0.01),
        "fast with data": _expected(3.5, 0.001, 0.01),
        "stored": _expected(2.0, 0.0, 0.0),
    }
    calibrated = {name: "data" in name for name in predictions}
    expected = ["stored", "fast", "safe", "risky", "fast with data"]
    assert rank_candidates(predictions, 0.01, calibrated) == expected
