"""What each weight choice is expected to gain and lose on this device, before anything is quantized.

Time is the sum over the model's matrices of what the kernel of its type was measured to take here (kernel_probe.py),
for the rows that prompts and decoding have; memory and the range of losses are the planner's. After the baseline is
measured, `settle` adds what is not matrix products. Called by the loop.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median

import torch

from tokenmill.calibrate.machine_probe import product_gflops, read_bandwidth_gb_s
from tokenmill.checkpoint.gguf_writer import TensorSlot
from tokenmill.hardware.catalog import Device
from tokenmill.hardware.machine import detect_machine
from tokenmill.hardware.weight_formats import FORMATS, WeightFormat
from tokenmill.kernels import cpu
from tokenmill.kernels.ggml_types import TYPES
from tokenmill.model.formats.coded import type_name as scheme_name
from tokenmill.model.formats.quantized import Scheme
from tokenmill.optimize.candidates import STORED, WeightChoice, parse_weights
from tokenmill.optimize.kernel_probe import KernelProbe, KernelSpeed
from tokenmill.optimize.results import Prediction
from tokenmill.plan.cost.closed_loop import Load
from tokenmill.plan.cost.performance import estimate
from tokenmill.plan.cost.this_machine import MachineCalibration, load_calibration
from tokenmill.plan.question.deployment import Deployment, total_weight_bytes
from tokenmill.plan.question.planned_model import PlannedModel
from tokenmill.plan.search.quality import quality_risk
from tokenmill.quantize.recipe import compose
from tokenmill.quantize.schemes import GROUP_SIZES, adjust

SlotsOf = Callable[[str], list[TensorSlot]]  # GGUF mix -> the tensors of its file
_HOPELESS_QUALITY = 3.0  # the low end of the published range, over the limit, beyond which nothing is tried
_CLEARLY_FASTER = 1.2  # the error of a prediction from measured kernels
_ENOUGH_ROWS = {"cpu": 256, "cuda": 2048}
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_FLOAT = "F16"  # of what methods leave unquantized

_LIKE = {  # mixes that the quality tables do not list -> the listed one with as many bits
    "q3_k_s": "q3_k_m",
    "q3_k_l": "q3_k_m",
    "q4_k_s": "q4_k_m",
    "iq4_nl": "q4_k_m",
    "iq4_xs": "q4_k_m",
    "q5_0": "q5_k_m",
    "q5_1": "q5_k_m",
    "q5_k_s": "q5_k_m",
    "iq3_xxs": "q3_k_m",
    "iq3_xs": "q3_k_m",
    "iq3_s": "q3_k_m",
    "iq3_m": "q3_k_m",
    "iq2_xxs": "q2_k",
    "iq2_xs": "q2_k",
    "iq2_s": "q2_k",
    "iq2_m": "q2_k",
    "tq1_0": "q2_k",
    "tq2_0": "q2_k",
}


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


@dataclass(frozen=True, slots=True)
class Work:
    """The traffic as products: prompts come in steps of many rows, decoding in steps of one row per request."""

    input_tokens: int
    output_tokens: int
    concurrency: int
    batch_tokens: int
    device: str = "cpu"

    @property
    def prompt_rows(self) -> int:
        """Of a step that computes prompts; beyond a limit, more rows take longer in proportion."""
        return max(1, min(self.batch_tokens, self.input_tokens * self.concurrency, _ENOUGH_ROWS[self.device]))

    @property
    def load(self) -> Load:
        return Load(self.input_tokens, self.output_tokens, self.concurrency)


class Predictor:
    """`stored`: the tensors of the checkpoint as it is, named as in a GGUF file; empty where they are not known.
    `speeds`: kernels by type; those of an earlier run may be given, the rest is measured when it is asked for."""

    def __init__(
        self,
        model: PlannedModel,
        slots_of: SlotsOf,
        stored: list[TensorSlot],
        device: Device,
        work: Work,
        torch_device: torch.device,
        speeds: dict[str, KernelSpeed] | None = None,
    ) -> None:
        self._model = model
        self._slots_of = slots_of
        self._stored = stored
        self._device = device
        self._work = work
        self.speeds = {} if speeds is None else speeds
        plain = slots_of(_FLOAT)
        matrices = Counter[tuple[int, int]]()
        for slot in plain:
            if _in_block(slot.name, slot.shape):
                matrices[slot.shape[-2], slot.shape[-1]] += math.prod(slot.shape)
        total = sum(matrices.values())
        self._inputs = [inputs for _, inputs in matrices]
        shape = matrices.most_common(1)[0][0]
        self._probe = KernelProbe(shape, (work.concurrency, work.prompt_rows), torch_device, total)
        self._schemes: dict[str, Scheme] = {}
        self._other = 0.0  # seconds per request that are not matrix products
        self._reference = _FLOAT

    def predict(self, weights: str) -> Prediction:
        """Raises UserError where it does not fit into memory or cannot be made."""
        choice = parse_weights(weights)
        planned = planner_format(choice, self._slots_of, self._model)
        deployment = self._deployment(planned)
        estimate(deployment, self._work.load)  # refuses what does not fit
        named = replace(planned, name=catalog_name(choice, planned, self._model))
        risk = quality_risk(replace(deployment, weights=named))
        counts = self._weights_by_type(choice)
        reference = self._weights_by_type(parse_weights(self._reference))
        return Prediction(
            speedup=self._seconds(reference) / self._seconds(counts),
            weight_bytes=int(total_weight_bytes(self._model, planned)),
            quality_low=risk.low / 100,
            quality_high=risk.high / 100,
            basis=f"kernels measured on {self._device.name}; quality: {risk.reason}",
            speed_class=", ".join(f"{count} {kind}" for (kind, _), count in sorted(counts.items())),
            bits=planned.bits,
        )

    def measure_kernels(self, weights: str) -> None:
        """Have the speeds of the types that it consists of."""
        for kind, _ in self._weights_by_type(parse_weights(weights)):
            self._speed(kind)

    def settle(self, baseline: str, speedups: Mapping[str, float]) -> None:
        """Measured speedups over the baseline: what matrix products do not explain is the same for every candidate.
        Ratios of runs in turn do not depend on how busy the machine is, seconds do."""
        self._reference, self._other = baseline, 0.0
        base = self._seconds(self._weights_by_type(parse_weights(baseline)))
        found = []
        for name, speedup in speedups.items():
            own = self._seconds(self._weights_by_type(parse_weights(name)))
            if speedup > 1 and own < base:
                found.append((base - speedup * own) / (speedup - 1))
        self._other = min(base, max(0.0, median(found))) if found else 0.0

    def _seconds(self, counts: Mapping[tuple[str, bool], int]) -> float:
        """Per request, when `concurrency` run together. The head multiplies one row per answer token only."""
        work, total = self._work, self._other
        for (kind, is_head), weights in counts.items():
            seconds = self._speed(kind).seconds
            total += weights * work.output_tokens * seconds[work.concurrency] / work.concurrency
            if not is_head:
                total += weights * work.input_tokens * seconds[work.prompt_rows] / work.prompt_rows
        return total

    def _speed(self, kind: str) -> KernelSpeed:
        if kind not in self.speeds:
            try:
                scheme = self._schemes.get(kind)
                self.speeds[kind] = self._probe.ggml(kind) if scheme is None else self._probe.scheme(scheme)
            except Exception:  # no kernel takes it here: as slow as floats
                if kind == _FLOAT:
                    raise
                self.speeds[kind] = replace(self._speed(_FLOAT), backend="unknown")
        return self.speeds[kind]

    def _weights_by_type(self, choice: WeightChoice) -> dict[tuple[str, bool], int]:
        """(type, whether it is the head's) -> weights that every token multiplies with."""
        if choice.is_stored and not self._stored:
            bits = FORMATS[self._model.stored_format].bits
            return self._weights_by_type(parse_weights("F16" if bits > 12 else "Q8_0" if bits > 6 else "Q4_0"))
        if choice.is_stored or choice.mix:
            slots = self._stored if choice.is_stored else self._slots_of(choice.mix)
            kinds = [(slot, slot.type_name) for slot in slots]
        else:
            scheme = method_scheme(choice, self._inputs)
            name = scheme_name(scheme) + ("" if scheme.activations == "none" else f" {scheme.activations}")
            self._schemes[name] = scheme
            slots = self._slots_of(_FLOAT)
            kinds = [(slot, name if _in_block(slot.name, slot.shape) else slot.type_name) for slot in slots]
        head = _HEAD if any(slot.name == _HEAD for slot, _ in kinds) else _EMBEDDING
        counts = Counter[tuple[str, bool]]()
        for slot, kind in kinds:
            if slot.name == head or _in_block(slot.name, slot.shape):
                counts[kind, slot.name == head] += math.prod(slot.shape)
        return dict(counts)

    def _deployment(self, weights: WeightFormat) -> Deployment:
        work = self._work
        return Deployment(
            self._model,
            self._device,
            weights,
            engine="tokenmill",
            batch_tokens=work.batch_tokens,
            max_sequences=max(1, work.concurrency),
        )


def _in_block(name: str, shape: tuple[int, ...]) -> bool:
    return name.startswith("blk.") and len(shape) > 1


def method_scheme(choice: WeightChoice, inputs: Sequence[int]) -> Scheme:
    """The scheme that the method gives matrices of these input sizes."""
    method = compose(choice.method)
    scheme = adjust(choice.method, method, choice.bits, None, None, "")
    if method.group_open:
        fitting = (size for size in GROUP_SIZES if all(width % size == 0 for width in inputs))
        scheme = replace(scheme, group_size=next(fitting, 0))
    return scheme


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
        embedding = slots[_EMBEDDING]
        head = slots.get(_HEAD, embedding)
        math_type = "bf16" if choice.is_plain else "int8"
        return WeightFormat(choice.mix.lower(), bits, math_type, embedding_bits=embedding, head_bits=head)
    scheme = method_scheme(choice, ())
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


def too_harmful(prediction: Prediction, limit: float) -> str:
    """Why published losses rule it out; empty if they do not."""
    if prediction.quality_low > _HOPELESS_QUALITY * max(limit, 0.001):
        return f"published losses begin at {prediction.quality_low:.1%}, the limit is {limit:.1%}"
    return ""


def too_slow(name: str, predictions: Mapping[str, Prediction]) -> str:
    """Why predicted speeds rule it out; empty if they do not."""
    own = predictions[name]
    if own.speedup * _CLEARLY_FASTER < 1:
        return f"predicted to be slower than the baseline ({own.speedup:.2f} x)"
    for other, theirs in predictions.items():
        if theirs.speedup > _CLEARLY_FASTER * own.speedup and theirs.quality_high <= own.quality_low:
            return f"{other} is predicted to be faster ({theirs.speedup:.2f} x against {own.speedup:.2f} x) and as good"
    return ""


def rank_candidates(
    predictions: Mapping[str, Prediction], limit: float, calibrated: Collection[str], by_blocks: Collection[str]
) -> list[str]:
    """Names in the order to try them: `stored` first, those made with calibration data last; of the others those likely
    within the limit, then the fast, those that are not made block by block, the safe, the name."""

    def key(name: str) -> tuple[bool, bool, bool, float, bool, float, str]:
        own = predictions[name]
        risky, fast = own.quality_low > limit, -round(own.speedup, 1)
        return (name != STORED, name in calibrated, risky, fast, name in by_blocks, own.quality_high, name)

    return sorted(predictions, key=key)
