"""The candidates: weight format x KV width x parallelism (tensor, pipeline, expert) on given devices.

Enumerates only what the hardware and the engine can run (a format whose arithmetic the chip lacks is left out, and so
is tensor parallelism wider than the link); batch limits and speculation are tuning.py's. Knows nothing of time or
money.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import Device, DeviceGroup
from tokenmill.hardware.weight_formats import WeightFormat, find_format
from tokenmill.plan.question.deployment import Deployment, plan_memory
from tokenmill.plan.question.engines import default_engine, default_limits
from tokenmill.plan.question.planned_model import PlannedModel
from tokenmill.plan.question.question import Fixed

_GPU_FORMATS: tuple[str, ...] = ("bf16", "fp8", "int8", "int4-g128", "nvfp4")
_BLOCK_FORMATS: tuple[str, ...] = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0")
_OWN_FORMATS: tuple[str, ...] = ("bf16", "fp8", "int8", "int4-g128-sym")  # our engine's on a GPU
_EXPERT_ENGINES = ("vllm", "sglang", "trtllm")  # place whole experts on devices
_NEEDS = {"fp8": "fp8", "fp8-block": "fp8", "int8": "int8", "nvfp4": "fp4", "mxfp4": "fp4"}


def formats_for(device: Device, model: PlannedModel, engine: str = "") -> list[WeightFormat]:
    """Formats with kernels in this engine on this device; the checkpoint's own comes first."""
    names = _OWN_FORMATS if engine == "tokenmill" and device.kind == "gpu" else _GPU_FORMATS
    if _runs_blocks(engine or default_engine(device), device):
        names = _BLOCK_FORMATS
    if device.vendor != "nvidia":  # other vendors use the open 4-bit float format
        names = tuple("mxfp4" if name == "nvfp4" else name for name in names)
    usable = [name for name in names if name not in _NEEDS or device.supports(_NEEDS[name])]
    stored = [model.stored_format] if model.stored_format != "bf16" else []
    return [find_format(name) for name in dict.fromkeys([*stored, *usable])]


def _runs_blocks(engine: str, device: Device) -> bool:
    """Engines that run GGUF blocks; KV is planned at 16 bits there."""
    return engine == "llama.cpp" or (engine == "tokenmill" and device.kind != "gpu")


def parallel_sizes(device: Device, count: int, model: PlannedModel) -> Iterator[tuple[int, int]]:
    """(tp, pp) by powers of two up to `count` devices: tensor parallelism as far as the link reaches, then stages."""
    widest = 1
    while 2 * widest <= min(count, max(1, device.link.devices)) and model.heads_divide(2 * widest):
        widest *= 2
    tp = 1
    while tp <= widest:
        yield tp, 1
        tp *= 2
    pp = 2
    while widest * pp <= count and pp <= model.num_layers:
        yield widest, pp
        pp *= 2


def expert_placements(group: int, model: PlannedModel, engine: str) -> list[tuple[int, int, int]]:
    """(tp, data_parallel, ep) of `group` devices that work on one layer: everything sharded; whole experts
    placed with attention sharded; whole experts placed with attention replicated (its KV is then not duplicated)."""
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
    """Every combination, with what the caller fixed held fixed. `narrow`: on each kind of device only the smallest
    parallelism that holds the model and the next one, where many kinds are compared."""
    plans = []
    for group in groups:
        engine = fixed.engine or default_engine(group.device)
        formats = [find_format(fixed.weights)] if fixed.weights else formats_for(group.device, model, engine)
        for wanted in formats:
            _check_math(wanted, group.device, bool(fixed.weights))
            fitting = 0
            for width, pp in parallel_sizes(group.device, group.count, model):
                bare = Deployment(model, group.device, _as_multiplied(wanted, engine, group.device), engine=engine)
                default = default_limits(engine, group.device.kind)
                bare = replace(
                    bare,
                    utilization=fixed.memory_share or bare.utilization,
                    batch_tokens=default.tokens,
                    max_sequences=default.sequences,
                )
                fitting += plan_memory(replace(bare, tp=width, pp=pp)).fits
                if narrow and fitting > 2:
                    break
                for tp, data_parallel, ep in expert_placements(width, model, engine):
                    if all(want in (0, has) for want, has in _wanted(fixed, tp, data_parallel, ep)):
                        placed = replace(bare, tp=tp, pp=pp, ep=ep, data_parallel=data_parallel)
                        plans += [replace(placed, kv_bytes=kv) for kv in _kv_widths(fixed.kv, engine, group.device)]
    if not plans:
        raise UserError(
            "no combination of these settings is possible", "drop --tp, --ep, --dp, --weights or --kv-cache-dtype"
        )
    return plans


def _wanted(fixed: Fixed, tp: int, data_parallel: int, ep: int) -> tuple[tuple[int, int], ...]:
    return (fixed.tp, tp), (fixed.data_parallel, data_parallel), (fixed.ep, ep)


def _as_multiplied(weights: WeightFormat, engine: str, device: Device) -> WeightFormat:
    """On CPUs our kernels multiply blocks in 8-bit integers, whatever the format stores."""
    integer = engine == "tokenmill" and device.kind == "cpu" and weights.bits < 16 and device.supports("int8")
    return replace(weights, math="int8") if integer else weights


def _kv_widths(stated: str, engine: str, device: Device) -> list[float]:
    if stated:
        return [_kv_bytes(stated)]
    narrow = not _runs_blocks(engine, device) and (device.supports("fp8") or device.supports("int8"))
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
