"""The planner's prediction for each weight choice on this machine, before anything is quantized, and which cannot win.

Roofs come from `plan --calibrate` if it was run, else from a probe of a few seconds. Times, memory and quality ranges
are the planner's; this module translates registry names to planner formats. Called by the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from tokenmill.calibrate.machine_probe import product_gflops, read_bandwidth_gb_s
from tokenmill.checkpoint.gguf_writer import TensorSlot
from tokenmill.hardware.catalog import Device
from tokenmill.hardware.machine import detect_machine
from tokenmill.hardware.weight_formats import FORMATS, WeightFormat
from tokenmill.kernels import cpu
from tokenmill.kernels.ggml_types import TYPES
from tokenmill.optimize.candidates import WeightChoice
from tokenmill.optimize.results import Prediction
from tokenmill.plan.cost.closed_loop import Load
from tokenmill.plan.cost.performance import estimate
from tokenmill.plan.cost.this_machine import MachineCalibration, load_calibration
from tokenmill.plan.question.deployment import Deployment, total_weight_bytes
from tokenmill.plan.question.planned_model import PlannedModel
from tokenmill.plan.search.quality import quality_risk
from tokenmill.quantize.recipe import compose
from tokenmill.quantize.schemes import adjust

SlotsOf = Callable[[str], list[TensorSlot]]  # GGUF mix -> the tensors of its file
_HOPELESS_QUALITY = 3.0  # the low end of the published range, over the limit, beyond which nothing is tried


_LIKE = {  # mixes that the quality tables do not list -> the listed one with as many bits
    "q3_k_s": "q3_k_m",
    "q3_k_l": "q3_k_m",
    "q4_k_s": "q4_k_m",
    "iq4_nl": "q4_k_m",
    "iq4_xs": "q4_k_m",
    "q5_0": "q5_k_m",
    "q5_1": "q5_k_m",
    "q5_k_s": "q5_k_m",
}
_CLEARLY_FASTER = 1.2  # the planner's error on a machine whose rooflines were measured


def this_machine() -> Device:
    """Measured roofs of this machine as a device of the planner."""
    calibration = load_calibration()
    if calibration is None:
        machine = detect_machine()
        calibration = MachineCalibration(
            cpu=machine.cpu,
            cores=machine.cores,
            threads=cpu.num_threads(),
            memory_bytes=machine.memory_bytes,
            date=datetime.now(UTC).date().isoformat(),
            bandwidth_gb_s=read_bandwidth_gb_s(),
            gflops=product_gflops(),
        )
    return calibration.device()


class Predictor:
    def __init__(self, model: PlannedModel, slots_of: SlotsOf, device: Device, load: Load) -> None:
        self._model = model
        self._slots_of = slots_of
        self._device = device
        self._load = load
        self._baseline = self._rate(planner_format(WeightChoice("F16", mix="F16"), slots_of, model))

    def predict(self, choice: WeightChoice) -> Prediction:
        """Raises UserError where it does not fit into memory or cannot be made."""
        weights = planner_format(choice, self._slots_of, self._model)
        deployment = self._deployment(weights)
        named = replace(weights, name=catalog_name(choice, weights, self._model))
        risk = quality_risk(replace(deployment, weights=named))
        return Prediction(
            speedup=self._rate(weights) / self._baseline,
            weight_bytes=int(total_weight_bytes(self._model, weights)),
            quality_low=risk.low / 100,
            quality_high=risk.high / 100,
            basis=f"roofs of {self._device.name} ({self._device.source}); quality: {risk.reason}",
        )

    def _rate(self, weights: WeightFormat) -> float:
        return estimate(self._deployment(weights), self._load).output_rate.value

    def _deployment(self, weights: WeightFormat) -> Deployment:
        concurrency = max(1, self._load.concurrency)
        return Deployment(
            self._model, self._device, weights, engine="tokenmill", batch_tokens=512, max_sequences=concurrency
        )


def planner_format(choice: WeightChoice, slots_of: SlotsOf, model: PlannedModel) -> WeightFormat:
    """Bits of each part and the arithmetic of its product, for any registered name."""
    if choice.is_stored:
        return replace(FORMATS[model.stored_format], math="int8")
    if choice.mix:
        planned = slots_of(choice.mix)
        slots = {slot.name: TYPES[slot.type_name].bits_per_value for slot in planned}
        sizes = {slot.name: slot.nbytes for slot in planned}
        blocks = [name for name in slots if name.startswith("blk.") and slots[name] < 32] or list(slots)
        bits = 8 * sum(sizes[name] for name in blocks) / sum(8 * sizes[name] / slots[name] for name in blocks)
        embedding = slots["token_embd.weight"]
        head = slots.get("output.weight", embedding)
        math = "bf16" if choice.is_plain else "int8"
        return WeightFormat(choice.mix.lower(), bits, math, embedding_bits=embedding, head_bits=head)
    method = compose(choice.method)
    scheme = adjust(choice.method, method, choice.bits, None, None, "")
    return WeightFormat(choice.name, scheme.bits_per_weight, "bf16" if scheme.element == "e4m3" else "int8")


def catalog_name(choice: WeightChoice, weights: WeightFormat, model: PlannedModel) -> str:
    """The format of the quality tables that is nearest: the same name, else the same kind and bits."""
    if choice.is_stored:
        return model.stored_format
    if choice.mix:
        return _LIKE.get(weights.name, weights.name)
    if choice.method in FORMATS:
        return choice.method
    if weights.bits > 6:
        return "int8" if "smoothquant" in choice.method or choice.method == "llm.int8" else "int8-weight-only"
    return "int4-g128"


def cannot_win(name: str, predictions: Mapping[str, Prediction], limit: float) -> str:
    """Why the planner rules it out; empty if it is worth trying."""
    own = predictions[name]
    if own.speedup * _CLEARLY_FASTER < 1:
        return f"predicted to be slower than the baseline ({own.speedup:.2f} x)"
    if own.quality_low > _HOPELESS_QUALITY * max(limit, 0.001):
        return f"published losses begin at {own.quality_low:.1%}, the limit is {limit:.1%}"
    for other, theirs in predictions.items():
        if theirs.speedup > _CLEARLY_FASTER * own.speedup and theirs.quality_high <= own.quality_low:
            return f"{other} is predicted to be faster ({theirs.speedup:.2f} x against {own.speedup:.2f} x) and as good"
    return ""


def rank_candidates(predictions: Mapping[str, Prediction], limit: float, calibrated: Mapping[str, bool]) -> list[str]:
    """Names in the order to try them: likely within the limit first, then fast, then safe, then quick to make."""

    def key(name: str) -> tuple[bool, float, bool, float, str]:
        own = predictions[name]
        return (own.quality_low > limit, -round(own.speedup, 1), calibrated[name], own.quality_high, name)

    return sorted(predictions, key=key)
