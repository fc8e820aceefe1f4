"""The plans worth judging: weight format x KV width x parallelism (tensor, pipeline, expert) on given devices.

Enumerates only what the hardware and the engine can run (a format whose arithmetic the chip lacks is left out, a cut
wider than the link too); batch limits and speculation are tuning.py's. Knows nothing of time or money.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import Device, DeviceGroup
from tokenmill.hardware.weight_formats import WeightFormat, find_format
from tokenmill.plan.deployment import Deployment, plan_memory
from tokenmill.plan.engines import usual_limits
from tokenmill.plan.planned_model import PlannedModel

_GPU_FORMATS: tuple[str, ...] = ("bf16", "fp8", "int8", "int4-g128", "nvfp4")
_BLOCK_FORMATS: tuple[str, ...] = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0")
_BLOCK_ENGINES = ("llama.cpp", "tokenmill")  # run GGUF blocks; KV is planned at 16 bits there
_EXPERT_ENGINES = ("vllm", "sglang", "trtllm")  # place whole experts on devices
_NEEDS = {"fp8": "fp8", "fp8-block": "fp8", "int8": "int8", "nvfp4": "fp4", "mxfp4": "fp4"}


@dataclass(frozen=True, slots=True)
class Fixed:
    """What the user wants to be so; empty and 0 are searched."""

    weights: str = ""
    kv: str = ""
    engine: str = ""
    tp: int = 0
    ep: int = 0
    data_parallel: int = 0
    memory_share: float = 0.0  # of the device that the engine may use

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "data_parallel"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}", "give at least 1, or leave it out")
        if not 0 <= self.memory_share <= 1:
            raise UserError(f"a memory share of {self.memory_share:g}", "give 0.5 to 0.98")


def default_engine(device: Device) -> str:
    if device.measured_shares:
        return "tokenmill"
    return "vllm" if device.kind in ("gpu", "tpu") else "llama.cpp"


def formats_for(device: Device, model: PlannedModel, engine: str = "") -> list[WeightFormat]:
    """Formats with kernels in this engine on this device; the checkpoint's own comes first."""
    names = _BLOCK_FORMATS if (engine or default_engine(device)) in _BLOCK_ENGINES else _GPU_FORMATS
    if device.vendor != "nvidia":  # the others' 4-bit floats are the open standard's
        names = tuple("mxfp4" if name == "nvfp4" else name for name in names)
    usable = [name for name in names if name not in _NEEDS or device.supports(_NEEDS[name])]
    stored = [model.stored_format] if model.stored_format != "bf16" else []
    return [find_format(name) for name in dict.fromkeys([*stored, *usable])]


def cuts(device: Device, count: int, model: PlannedModel) -> Iterator[tuple[int, int]]:
    """(tp, pp) by powers of two up to `count` devices: tensor cuts as far as the link reaches, then stages."""
    heads = min(model.head_counts, default=1)
    widest = 1
    while 2 * widest <= min(count, max(1, device.link.devices)) and heads % (2 * widest) == 0:
        widest *= 2
    tp = 1
    while tp <= widest:
        yield tp, 1
        tp *= 2
    pp = 2
    while widest * pp <= count and pp <= model.num_layers:
        yield widest, pp
        pp *= 2


def expert_cuts(group: int, model: PlannedModel, engine: str) -> list[tuple[int, int, int]]:
    """(tp, data_parallel, ep) of `group` devices that work on one layer: everything cut inside; whole experts placed
    with attention cut; whole experts placed with attention copied (its KV is then not replicated)."""
    plain = (group, 1, 1)
    experts = [kind.feed_forward.num_experts for kind in model.layers if kind.feed_forward.num_experts]
    if group == 1 or not experts or engine not in _EXPERT_ENGINES or any(count % group for count in experts):
        return [plain]
    return [plain, (group, 1, group), (1, group, group)]


def enumerate_plans(
    model: PlannedModel,
    groups: Sequence[DeviceGroup],
    fixed: Fixed = Fixed(),  # noqa: B008
    narrow: bool = False,
) -> list[Deployment]:
    """Every combination, with what the caller fixed held fixed. `narrow`: on each kind of device only the smallest cut
    that holds the model and the next one, where many kinds are compared."""
    plans = []
    for group in groups:
        engine = fixed.engine or default_engine(group.device)
        formats = [find_format(fixed.weights)] if fixed.weights else formats_for(group.device, model, engine)
        for wanted in formats:
            _check_math(wanted, group.device, bool(fixed.weights))
            fitting = 0
            for width, pp in cuts(group.device, group.count, model):
                bare = Deployment(model, group.device, _as_multiplied(wanted, engine, group.device), engine=engine)
                usual = usual_limits(engine)
                bare = replace(
                    bare,
                    utilization=fixed.memory_share or bare.utilization,
                    batch_tokens=usual.tokens,
                    max_sequences=usual.sequences,
                )
                fitting += plan_memory(replace(bare, tp=width, pp=pp)).fits
                if narrow and fitting > 2:
                    break
                for tp, copies, ep in expert_cuts(width, model, engine):
                    if all(want in (0, has) for want, has in _wanted(fixed, tp, copies, ep)):
                        cut = replace(bare, tp=tp, pp=pp, ep=ep, data_parallel=copies)
                        plans += [replace(cut, kv_bytes=kv) for kv in _kv_widths(fixed.kv, engine, group.device)]
    if not plans:
        raise UserError(
            "no combination of the given settings exists", "drop --tp, --ep, --dp, --weights or --kv-cache-dtype"
        )
    return plans


def _wanted(fixed: Fixed, tp: int, copies: int, ep: int) -> tuple[tuple[int, int], ...]:
    return (fixed.tp, tp), (fixed.data_parallel, copies), (fixed.ep, ep)


def _as_multiplied(weights: WeightFormat, engine: str, device: Device) -> WeightFormat:
    """On CPUs our kernels multiply blocks in 8-bit integers, whatever the format stores."""
    integer = engine == "tokenmill" and device.kind == "cpu" and weights.bits < 16 and device.supports("int8")
    return replace(weights, math="int8") if integer else weights


def _kv_widths(stated: str, engine: str, device: Device) -> list[float]:
    if stated:
        return [_kv_bytes(stated)]
    narrow = engine not in _BLOCK_ENGINES and (device.supports("fp8") or device.supports("int8"))
    return [2.0, 1.0] if narrow else [2.0]


def _kv_bytes(name: str) -> float:
    widths = {"bf16": 2.0, "fp16": 2.0, "auto": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
    if name not in widths:
        raise UserError(f"unknown KV dtype '{name}'", f"one of {', '.join(widths)}")
    return widths[name]


def _check_math(weights: WeightFormat, device: Device, stated: bool) -> None:
    need = _NEEDS.get(weights.name)
    if stated and need == "fp4" and not device.supports("fp4"):
        raise UserError(
            f"{device.name} cannot multiply {need} ({weights.name})", "use int4-g128 (weight only), fp8 or int8 there"
        )
