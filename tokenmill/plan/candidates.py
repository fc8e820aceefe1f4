"""The plans worth judging: weight format x KV width x parallelism x batch limits on given devices.

Enumerates only what the hardware and the engine can run (a format whose arithmetic the chip lacks is left out, a cut
wider than the link too), each with the rule that put it there. Knows nothing of time or money.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import Device, DeviceGroup
from tokenmill.hardware.weight_formats import WeightFormat, find_format
from tokenmill.plan.deployment import Deployment, plan_memory
from tokenmill.plan.planned_model import PlannedModel

_GPU_FORMATS: tuple[str, ...] = ("bf16", "fp8", "int8", "int4-g128", "nvfp4")
_BLOCK_FORMATS: tuple[str, ...] = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0")
_BLOCK_ENGINES = ("llama.cpp", "tokenmill")  # run GGUF blocks; KV is planned at 16 bits there
_NEEDS = {"fp8": "fp8", "fp8-block": "fp8", "int8": "int8", "nvfp4": "fp4", "mxfp4": "fp4"}


def default_engine(device: Device) -> str:
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
    heads = min((kind.attention.num_heads for kind in model.layers if kind.attention.num_heads), default=1)
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


def enumerate_plans(
    model: PlannedModel,
    groups: Sequence[DeviceGroup],
    *,
    weights: str = "",
    kv: str = "",
    engine: str = "",
    tp: int = 0,
    narrow: bool = False,
) -> list[Deployment]:
    """Every combination, with what the caller fixed held fixed. `narrow`: on each kind of device only the smallest cut
    that holds the model and the next one, where many kinds are compared."""
    plans = []
    for group in groups:
        name = engine or default_engine(group.device)
        formats = [find_format(weights)] if weights else formats_for(group.device, model, name)
        widths = [_kv_bytes(kv)] if kv else ([2.0] if name in _BLOCK_ENGINES else [2.0, 1.0])
        for wanted in formats:
            _check_math(wanted, group.device, bool(weights))
            fitting = 0
            for cut_tp, pp in cuts(group.device, group.count, model):
                if tp and cut_tp != tp:
                    continue
                fitting += plan_memory(Deployment(model, group.device, wanted, 2.0, name, cut_tp, pp)).fits
                if narrow and fitting > 2:
                    break
                for kv_bytes in widths:
                    if kv_bytes == 1.0 and not (group.device.supports("fp8") or group.device.supports("int8")):
                        continue
                    plans.append(Deployment(model, group.device, wanted, kv_bytes, name, cut_tp, pp))
    if not plans:
        raise UserError("no combination of the given settings exists", "drop --tp, --weights or --kv-cache-dtype")
    return plans


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
