"""What the planner rules out before anything is made, and why."""

from __future__ import annotations

import pytest
import torch

from tokenmill.checkpoint.gguf_writer import TensorSlot
from tokenmill.hardware.catalog import load_catalog
from tokenmill.optimize.kernel_probe import KernelSpeed
from tokenmill.optimize.predict import Predictor, Work, rank_candidates, too_harmful, too_slow
from tokenmill.optimize.results import Prediction
from tokenmill.plan.question.model_names import describe_for_planning


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
    predictions["fast in blocks"] = _expected(3.5, 0.0, 0.0)
    expected = ["stored", "fast", "fast in blocks", "safe", "risky", "fast with data"]
    assert rank_candidates(predictions, 0.01, {"fast with data"}, {"fast in blocks"}) == expected


def _predictor(speeds: dict[str, KernelSpeed]) -> Predictor:
    """A model of one matrix per layer and a head, with kernels of known speed for 2 and 64 rows."""
    description = describe_for_planning("llama-3.2-1b")

    def slots(mix: str) -> list[TensorSlot]:
        kind = {"F16": "F16", "F32": "F32", "Q8_0": "Q8_0", "Q4_0": "Q4_0"}[mix]
        return [
            TensorSlot("token_embd.weight", (512, 256), "F16"),
            TensorSlot("blk.0.ffn_up.weight", (1024, 256), kind),
            TensorSlot("blk.0.attn_norm.weight", (256,), "F32"),
        ]

    device = load_catalog().find_device("neoverse-n1")
    return Predictor(description, slots, slots("Q8_0"), device, Work(32, 8, 2, 512), torch.device("cpu"), speeds)


def _speed(seconds: float) -> KernelSpeed:
    return KernelSpeed("cpu", {2: seconds, 64: 16 * seconds})


def test_predictions_follow_the_kernels() -> None:
    speeds = {"F16": _speed(8e-9), "Q8_0": _speed(2e-9), "Q4_0": _speed(3e-9)}
    predictor = _predictor(speeds)
    speedups = {name: predictor.predict(name).speedup for name in ("F16", "Q8_0", "Q4_0")}
    assert speedups["F16"] == 1
    assert speedups["Q8_0"] > speedups["Q4_0"] > 1.5, "fewer bits are not faster where the kernel is slower"
    assert predictor.predict("stored").speed_class == predictor.predict("Q8_0").speed_class
    assert predictor.predict("Q4_0").speed_class != predictor.predict("Q8_0").speed_class


def test_the_first_measurement_adds_what_is_no_matrix_product() -> None:
    predictor = _predictor({"F16": _speed(8e-9), "Q8_0": _speed(2e-9)})
    before = predictor.predict("Q8_0").speedup
    predictor.settle("F16", {"Q8_0": 1.5})  # less than the products alone would give
    assert before > 2
    assert predictor.predict("Q8_0").speedup == pytest.approx(1.5)
