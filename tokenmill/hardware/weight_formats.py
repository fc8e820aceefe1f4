"""How many bits a weight takes in each format, scales and zero points included, and what the arithmetic runs in.

Facts about storage only (formula F1 of docs/planner.md); which tensors a model has is the caller's to say. Read by the
memory model, the planner and the cost model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tokenmill.errors import unknown_name


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Bits per weight by what the matrix is for. `math`: the dtype of the multiplication (decides rate and table)."""

    name: str
    bits: float  # ordinary linear layers
    math: str  # "bf16" | "fp8" | "int8" | "fp4"
    down_bits: float = 0.0  # second matrix of the feed-forward; 0: as `bits`
    value_bits: float = 0.0  # value projection; 0: as `bits`
    output_bits: float = 0.0  # output projection of attention
    embedding_bits: float = 16.0
    head_bits: float = 16.0
    router_bits: float = 16.0
    vision_bits: float = 16.0  # the image tower stays at 16 bits: it is small and sensitive

    def bits_for(self, part: str, split: str = "column") -> float:
        """`part` and `split` as in checkpoint/matrices.Matrix."""
        if part in ("embedding", "head", "router", "vision"):
            return float(getattr(self, f"{part}_bits"))
        if split == "row":
            return (self.output_bits if part == "attention" else self.down_bits) or self.bits
        if part == "attention" and self.value_bits:  # one sixth of a fused qkv matrix is V (32 query, 8 KV heads)
            return self.bits + (self.value_bits - self.bits) / 6
        return self.bits


def grouped_bits(bits: int, group: int, scale_bits: float = 16, zero_bits: float = 0) -> float:
    """F1: the bits themselves plus one scale (and zero point) per group."""
    return bits + (scale_bits + zero_bits) / group


_Q3, _Q4, _Q5, _Q6 = 3.4375, 4.5, 5.5, 6.5625  # ggml K blocks


def _kquant(name: str, bits: float, down: float, value: float, output: float, embedding: float) -> WeightFormat:
    return WeightFormat(name, bits, "bf16", down, value, output, embedding, _Q6, 32.0)


def _half(low: float, high: float) -> float:
    """K_M mixes keep half of the layers of a sensitive kind at the higher type."""
    return (low + high) / 2


FORMATS: dict[str, WeightFormat] = {
    entry.name: entry
    for entry in (
        WeightFormat("fp32", 32, "bf16", embedding_bits=32, head_bits=32, router_bits=32),
        WeightFormat("bf16", 16, "bf16"),
        WeightFormat("fp8", 8, "fp8"),
        WeightFormat("fp8-block", grouped_bits(8, 128 * 128, 32), "fp8"),
        WeightFormat("int8", 8, "int8"),
        WeightFormat("int8-weight-only", 8, "bf16"),
        WeightFormat("int4-g128", grouped_bits(4, 128, 16, 4), "bf16"),
        WeightFormat("int4-g128-sym", grouped_bits(4, 128, 16), "bf16"),
        WeightFormat("int4-g64", grouped_bits(4, 64, 16, 4), "bf16"),
        WeightFormat("int4-g32", grouped_bits(4, 32, 16, 4), "bf16"),
        WeightFormat("nvfp4", grouped_bits(4, 16, 8), "fp4"),
        WeightFormat("mxfp4", grouped_bits(4, 32, 8), "fp4"),
        _kquant("q2_k", 2.625, _Q3, _Q4, _Q3, 2.625),
        _kquant("q3_k_m", _Q3, 4.55, 4.6, _Q4, _Q3),
        _kquant("q4_k_m", _Q4, _half(_Q4, _Q6), _half(_Q4, _Q6), _Q4, _Q4),
        _kquant("q5_k_m", _Q5, _half(_Q5, _Q6), _half(_Q5, _Q6), _Q5, _Q5),
        _kquant("q6_k", _Q6, _Q6, _Q6, _Q6, _Q6),
        _kquant("q4_0", 4.5, 4.5, 4.5, 4.5, 4.5),
        _kquant("q4_1", 5.0, 5.0, 5.0, 5.0, 5.0),
        WeightFormat("q8_0", 8.5, "bf16", embedding_bits=8.5, head_bits=8.5, router_bits=32),
    )
}
_ALIASES = {
    "fp16": "bf16",
    "bfloat16": "bf16",
    "float16": "bf16",
    "none": "bf16",
    "w8a8": "int8",
    "w4a16": "int4-g128",
    "awq": "int4-g128",
    "gptq": "int4-g128",
    "int4": "int4-g128",
    "fp8_block": "fp8-block",
    "fp4": "nvfp4",
}


def find_format(name: str) -> WeightFormat:
    key = name.lower()
    key = _ALIASES.get(key, key)
    if key not in FORMATS:
        raise unknown_name("weight format", name, [*FORMATS, *_ALIASES])
    return FORMATS[key]


def weight_bytes(tensors: Iterable[tuple[float, str, str]], weights: WeightFormat) -> float:
    """F1: sum over (parameters, part, split)."""
    return sum(count * weights.bits_for(part, split) for count, part, split in tensors) / 8
