"""Which kernel, cut up how, for the experts of a layer: the one place that decides. Knows shapes only.

What counts is how many rows an expert gets: tokens * experts per token / experts. `rule` is the table; the benchmark
(`benchmarks/gpu_experts.py --tune`) measures `candidates` and says where another plan is faster.

| kind      | rows of an expert | kernel, tokens of a tile | why                                                       |
|-----------|-------------------|--------------------------|-----------------------------------------------------------|
| bf16, fp8 | up to 4 tokens    | gemv                     | each chosen expert is read as a matrix times a vector; no |
|           |                   |                          | sort, no padding, the sum over experts in registers       |
| all       | up to 8           | product, 16              | bound by reading the experts hit: the smallest tile       |
|           | up to 20; bf16    | product, 32              | most experts fit one tile, so weights are read once;      |
|           | 28, mxfp4 40      |                          | beyond 20 tiles of twice as many rows of the matrices     |
|           | up to 48          | product, 64              |                                                           |
|           | more              | product, 128; fp8: 64    | bound by the tensor cores                                 |

4-bit codes have no gemv: unpacking costs more than the product, and on the tensor cores it needs fewer instructions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenmill.kernels.triton.shared.launch import INTERPRETED

GEMV, PRODUCT = "gemv", "product"
GEMV_TOKENS = 4
FOUR_BITS = ("int4", "mxfp4")
_NARROW_UP_TO = {"bf16": 28, "mxfp4": 40}  # rows of an expert; measured on an H200 at 24 and 32
MAX_SUMS = 4096  # of a tile for each of its warps: half of their registers


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one of the two products is cut up."""

    rows: int  # of the matrices in a tile; of both halves where they gate each other
    depth: int = 128  # of a step; 4 bits: a block of codes, whatever it says here
    warps: int = 4
    stages: int = 4
    descriptor: bool = False  # weights are copied by the tensor memory accelerator; bf16 and fp8
    blocks: int = 8  # neighbouring blocks of tokens that go through the rows of their matrices together


@dataclass(frozen=True, slots=True)
class Plan:
    """`tokens` of a tile; gemv has none."""

    kernel: str
    tokens: int
    gate_up: Tiling
    down: Tiling


def rule(kind: str, num_experts: int, experts_per_token: int, tokens: int, inner: int = 0) -> Plan:
    """The plan without measurements: the table of the module's head. `inner`: depth of the second product."""
    if kind in ("bf16", "fp8") and tokens <= GEMV_TOKENS:
        return _gemv(inner)
    average = tokens * experts_per_token / num_experts
    if 20 < average <= _NARROW_UP_TO.get(kind, 0) and not INTERPRETED:
        tiling = Tiling(128, 0, 4, 3) if kind in FOUR_BITS else Tiling(128, 64, 4, 5)
        return Plan(PRODUCT, 32, tiling, tiling)
    rows = 16 if average <= 8 else 32 if average <= 20 else 64 if average <= 48 else 128
    return _product(kind, min(rows, 64) if kind == "fp8" else rows, is_long=average > 48)


def _gemv(inner: int) -> Plan:
    if INTERPRETED:
        return Plan(GEMV, 0, Tiling(64, 128), Tiling(64, 128))
    return Plan(GEMV, 0, Tiling(8, 1024, 4), Tiling(4, piece(inner, 1024), 4))


def piece(depth: int, most: int) -> int:
    """The longest piece of a row, a power of two from 256 on, that adds least to its length."""
    sizes = [size for size in (256, 512, 1024, 2048) if size <= most]
    return min(reversed(sizes), key=lambda size: -(-depth // size) * size)


def _product(kind: str, tokens: int, is_long: bool = False) -> Plan:
    if INTERPRETED:
        tiling = Tiling(128, 128, 4, 1)
        return Plan(PRODUCT, tokens, tiling, tiling)
    if kind in FOUR_BITS:
        tiling = Tiling(64, 0, 4, 4) if tokens <= 32 else Tiling(128, 0, 4 if tokens == 64 else 8, 3)
        return Plan(PRODUCT, tokens, tiling, tiling)
    if kind == "fp8" and is_long:  # the sum of a step is kept beside the sum of all: half the tokens for twice the sums
        down = Tiling(128, 128, 4, 4, descriptor=True)
        return Plan(PRODUCT, tokens, replace(down, rows=256, warps=8, stages=3), down)
    if tokens <= 32:
        tiling = Tiling(64, 128, 4, 4)
    elif tokens == 64:
        tiling = Tiling(128, 64 if kind == "bf16" else 128, 4, 4)
    else:
        wide = Tiling(256, 64 if kind == "bf16" else 128, 8, 3, descriptor=True)
        return Plan(PRODUCT, tokens, wide, replace(wide, rows=128, stages=4))
    return Plan(PRODUCT, tokens, tiling, tiling)


def candidates(kind: str, num_experts: int, experts_per_token: int, tokens: int, inner: int = 0) -> list[Plan]:
    """The rule's plan and its neighbours."""
    first = rule(kind, num_experts, experts_per_token, tokens, inner)
    plans = [first]
    if first.kernel == GEMV:
        plans += [replace(first, gate_up=Tiling(r, d, w), down=Tiling(r, d, w)) for r, d, w in _GEMV_TILINGS]
        plans += [_product(kind, 16)]
        return list(dict.fromkeys(plans))
    sizes = [s for s in (first.tokens // 2, first.tokens, 2 * first.tokens) if 16 <= s <= 256]
    for size in sizes:
        plan = replace(_product(kind, min(size, 128)), tokens=size)
        plans += [plan] if size <= 128 else []
        for tiling in _tilings(kind, size):
            if tiling.rows * size * (2 if kind == "fp8" else 1) <= MAX_SUMS * tiling.warps:
                plans += [replace(plan, gate_up=tiling, down=tiling)]
    return list(dict.fromkeys(plans))


_GEMV_TILINGS = ((4, 1024, 4), (4, 2048, 4), (8, 512, 4), (8, 1024, 8), (16, 512, 8), (4, 512, 2))


def _tilings(kind: str, tokens: int) -> list[Tiling]:
    depth = 128 if kind == "fp8" else 64
    if kind in FOUR_BITS:
        if tokens <= 32:
            return [Tiling(128, 0, 4, 3), Tiling(128, 0, 4, 5), Tiling(64, 0, 4, 6), Tiling(128, 0, 8, 4)]
        return [Tiling(128, 0, 8, 4), Tiling(128, 0, 4, 3), Tiling(256, 0, 8, 3), Tiling(64, 0, 4, 4)]
    if tokens <= 32:
        return [
            Tiling(64, 128, 4, 4, descriptor=True),
            Tiling(128, depth, 4, 5),
            Tiling(128, 128, 4, 4, descriptor=True),
            Tiling(64, 128, 4, 6),
        ]
    if tokens == 64:
        return [Tiling(128, depth, 4, 4, descriptor=True), Tiling(256, depth, 8, 3, descriptor=True)]
    if kind == "fp8":
        return [
            Tiling(64, depth, 4, 4, descriptor=True),
            Tiling(64, depth, 4, 3, descriptor=True),
            Tiling(128, depth, 8, 3, descriptor=True),
            Tiling(128, depth, 8, 4),
        ]
    return [
        Tiling(128, depth, 4, 4, descriptor=True),
        Tiling(128, depth, 8, 4, descriptor=True),
        Tiling(128, depth, 8, 4),
        Tiling(256, depth, 8, 3),
        Tiling(256, depth, 8, 4, descriptor=True),
    ]
