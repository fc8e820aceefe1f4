"""Time of the kernels of one step on one device: linear layers, experts, attention, the small ones in between.

Each function returns a curve over tokens (or a surface over batch and context), from the measured H200 tables scaled to
the wanted device by its roofs. Formulas F4, F5, F7. Called by step_cost.py; plans of one search share most curves, so
each is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import log, sqrt

from tokenmill.checkpoint.description import FeedForward
from tokenmill.checkpoint.mixers import Attention, LatentAttention, Recurrent
from tokenmill.hardware.catalog import Device, find_device
from tokenmill.hardware.roofline import Work, transferred
from tokenmill.hardware.weight_formats import WeightFormat
from tokenmill.plan.cost import tables
from tokenmill.plan.cost.curves import Curve, Surface
from tokenmill.plan.cost.engine_costs import RoofShares, family_shares
from tokenmill.plan.cost.tables import ExpertShape

LAUNCH_MS = 0.003  # of a kernel inside a captured graph
_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
TOKENS = (*_TOKENS, 12288, 16384, 32768)
_KEPT = 1 << 12  # curves of each kind
LENGTHS = (*TOKENS, 65536, 131072, 262144, 524288, 1048576)


def _fitted(work: Work, device: Device) -> Work:
    """The work as this chip generation sees it: more of it where its roofs are reached less well."""
    shares = family_shares(device.family)
    return Work(work.nbytes / shares.memory, work.flops / shares.compute, work.math)


@lru_cache(1)
def measured_device() -> Device:
    return find_device(tables.MEASURED_ON)


def _operands(device: Device, weights: WeightFormat, bits: float) -> str:
    """What a product multiplies. Our CPU kernels multiply every quantized format as integers, and a machine that was
    measured says what they reach."""
    if device.kind == "cpu" and device.measured_shares and bits < 16:
        return "int8"
    return weights.math if bits < 16 and device.supports(weights.math) else "bf16"


@lru_cache(_KEPT)
def linear_curve(
    device: Device, weights: WeightFormat, bits: float, outputs: int, inputs: int, roofs: RoofShares | None
) -> Curve:
    """One matrix multiplication over tokens."""
    math = _operands(device, weights, bits)
    if roofs:
        size = inputs * outputs
        return _roof_curve(device, roofs, lambda tokens: Work(size * bits / 8, 2.0 * tokens * size, math))
    table = {"bf16": "bfloat16", "int8": "fp8", "fp4": "fp8", "fp8": "fp8"}[math]
    points, times = tables.gemm(table, outputs, inputs)
    table_bits, table_math = (16.0, "bf16") if table == "bfloat16" else (8.0, "fp8")
    moved = []
    for tokens, ms in zip(points, times, strict=True):
        flops, rows = 2.0 * tokens * inputs * outputs, 2.0 * tokens * (inputs + outputs)
        measured = Work(inputs * outputs * table_bits / 8 + rows, flops, table_math)
        wanted = Work(inputs * outputs * bits / 8 + rows, flops, math)
        moved.append(transferred(ms, measured, measured_device(), _fitted(wanted, device), device, LAUNCH_MS))
    return Curve(points, moved)


def _roof_curve(
    device: Device, shares: RoofShares, work: Callable[[float], Work], points: tuple[int, ...] = TOKENS
) -> Curve:
    """Time from the roofs alone, for engines and devices without tables."""

    def ms(tokens: float) -> float:
        one = work(tokens)
        return shares.floor_ms + Work(one.nbytes / shares.memory, one.flops / shares.compute, one.math).milliseconds(
            device
        )

    return Curve(points, [ms(point) for point in points])


def coverage(tokens: float, per_token: int, num_experts: int) -> float:
    """F7: experts that at least one of the tokens is sent to."""
    return num_experts * (1.0 - (1.0 - per_token / num_experts) ** tokens)


def uneven(tokens: float, per_token: int, ep: int, skew: float) -> float:
    """Load of the busiest of `ep` ranks over the mean: every step waits for it. Chance makes small batches uneven, skew
    is what remains of popular experts in large ones."""
    if ep <= 1:
        return 1.0
    chance = sqrt(2.0 * log(ep) * ep / max(1.0, tokens * per_token))
    return min(float(ep), 1.0 + skew + chance)


def expert_work(shape: ExpertShape, tokens: float, bits: float, math: str) -> Work:
    """Weights of the experts touched on one rank, and the arithmetic of its share of the tokens."""
    matrices = 3.0 * shape.hidden * shape.width / shape.tp
    read = coverage(tokens, shape.per_token, shape.num_experts) / shape.ep * matrices * bits / 8
    return Work(read + 4.0 * tokens * shape.hidden, 2.0 * tokens * shape.per_token / shape.ep * matrices, math)


@lru_cache(_KEPT)
def expert_curve(
    device: Device, weights: WeightFormat, hidden: int, ffn: FeedForward, tp: int, ep: int, roofs: RoofShares | None
) -> Curve:
    """The experts of one layer on one rank over the tokens of the whole group."""
    native = device.supports(weights.math)
    math = _operands(device, weights, weights.bits)
    shape = ExpertShape(hidden, ffn.expert_size, ffn.experts_per_token, ffn.num_experts, tp, ep)
    if roofs:
        return _roof_curve(device, roofs, lambda tokens: expert_work(shape, tokens, weights.bits, math))
    table = {"bf16": "bfloat16", "fp8": "fp8_block", "fp4": "fp8_block", "int8": "fp8"}[math]
    if weights.bits < 6 and not native:
        table = "mxfp4"
    (points, times), nearest = tables.experts(table, shape)
    table_bits = {"bfloat16": 16.0, "fp8": 8.0, "fp8_block": 8.0, "mxfp4": 4.25}[table]
    table_math = "fp8" if table.startswith("fp8") else "bf16"
    moved = []
    for tokens, ms in zip(points, times, strict=True):
        measured = expert_work(nearest, tokens, table_bits, table_math)
        wanted = expert_work(shape, tokens, weights.bits, math)
        moved.append(transferred(ms, measured, measured_device(), _fitted(wanted, device), device, 5 * LAUNCH_MS))
    return Curve(points, moved)


@lru_cache(_KEPT)
def decode_surface(
    device: Device, attention: Attention | LatentAttention, tp: int, kv_bytes: float, roofs: RoofShares | None
) -> Surface:
    """One layer's attention of one new token per sequence, over (batch, mean context)."""
    heads = max(1, attention.num_heads // tp)
    latent_shares = roofs or RoofShares(_LATENT_MEMORY, _LATENT_COMPUTE, 4 * LAUNCH_MS)
    if isinstance(attention, LatentAttention):
        width, flops = attention.kv_rank + attention.rope_dim, heads * (2 * attention.kv_rank + attention.rope_dim)
        return _formula_decode(device, width * kv_bytes, 2.0 * flops, latent_shares)
    kv_heads = max(1, attention.num_kv_heads // tp)
    if roofs:
        width, flops = 2 * kv_heads * attention.head_dim, heads * 2 * attention.head_dim
        return _formula_decode(device, width * kv_bytes, 2.0 * flops, roofs)
    stored = 1 if kv_bytes <= 1 else 2
    per_token = 2.0 * kv_heads * attention.head_dim
    batches, curves = [], []
    for batch, (contexts, times) in tables.decode_attention(attention.head_dim, kv_heads, heads, stored):
        moved = []
        for context, ms in zip(contexts, times, strict=True):
            numbers = batch * context * per_token
            measured, wanted = Work(numbers * stored, 0.0), Work(numbers * kv_bytes, 0.0)
            moved.append(transferred(ms, measured, measured_device(), _fitted(wanted, device), device, 4 * LAUNCH_MS))
        batches.append(batch)
        curves.append(Curve(contexts, moved))
    return Surface(batches, curves)


# Latent attention has no table here; shares of the roofs as published for FlashMLA on Hopper (3000 GB/s, 660 TFLOP/s).
_LATENT_MEMORY, _LATENT_COMPUTE = 0.62, 0.55


def _formula_decode(device: Device, nbytes: float, flops: float, shares: RoofShares) -> Surface:
    """Attention from the bytes and operations of one token of context."""
    contexts = [1.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0]

    def ms(tokens: float) -> float:
        work = Work(tokens * nbytes / shares.memory, tokens * flops / shares.compute)
        return shares.floor_ms + _fitted(work, device).milliseconds(device)

    batches = [1.0, 8.0, 64.0, 512.0, 4096.0]
    return Surface(batches, [Curve(contexts, [ms(batch * context) for context in contexts]) for batch in batches])


@lru_cache(_KEPT)
def prefill_curve(
    device: Device, attention: Attention | LatentAttention, tp: int, kv_bytes: float, roofs: RoofShares | None
) -> Curve:
    """One layer's causal attention over a prompt, over its length (other shapes: see `equivalent_length`)."""
    heads = max(1, attention.num_heads // tp)
    if isinstance(attention, LatentAttention):
        kv_heads, head_dim = heads, (attention.nope_dim + attention.rope_dim + attention.value_dim) // 2
    else:
        kv_heads, head_dim = max(1, attention.num_kv_heads // tp), attention.head_dim
    if roofs:
        return _roof_curve(device, roofs, lambda length: Work(0.0, 2.0 * heads * head_dim * length * length), LENGTHS)
    points, times = tables.prefill_attention(head_dim, kv_heads, heads, 1 if kv_bytes <= 1 else 2)
    moved = []
    for length, ms in zip(points, times, strict=True):
        work = Work(2.0 * length * (2 * heads + 2 * kv_heads) * head_dim, 2.0 * heads * head_dim * length * length)
        moved.append(transferred(ms, work, measured_device(), _fitted(work, device), device, 4 * LAUNCH_MS))
    for doubling in (2, 4, 8, 16, 32, 64):  # past the table the work grows with the square
        moved.append(moved[len(times) - 1] * doubling * doubling)
    return Curve([*points, *(points[-1] * doubling for doubling in (2, 4, 8, 16, 32, 64))], moved)


def recurrent_curve(device: Device, mixer: Recurrent, tp: int) -> Callable[[float], float]:
    """Reading and writing the state of each sequence in a recurrent layer, over sequences."""
    per_sequence = 2 * mixer.kv_need().state_bytes / tp
    return lambda sequences: 4 * LAUNCH_MS + sequences * per_sequence / (0.7 * device.bandwidth_gb_s * 1e6)
