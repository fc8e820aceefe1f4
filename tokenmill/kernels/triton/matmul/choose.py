"""Which kernel, cut up how, for a product of a given kind, shape and token count: the one place that decides.

A plan is what was measured here, if anything was (`PlanTable`, a file of the user's cache keyed by GPU and versions),
else `rule`, whose table was fitted to an H200 with `benchmarks/gpu_kernels.py linear`. Also decided here: what a plan's
kernel fuses, how often its depth is split, where scales go, which matrices are better expanded to bf16. Knows shapes
only: no weights, no launches. Kinds: "bf16"; "fp8", "int8" (a scale per row, input quantized per token); with groups
along the depth "int4" (blocks of 32 words, groups of 32 or more), "grouped4" (small or uneven ones), "grouped8"; int4
with float8 inputs "w4a8", "w4a8g32" (groups of 32), "w4a8row" (one scale for a row).

| kind       | tokens  | kernel      | why (N, K: rows and depth of the matrix; us: all products of a layer of 8B)    |
|------------|---------|-------------|---------------------------------------------------------------------------------|
| bf16       | 1       | gemv        | weights are requested before the input is there: a step of 8B 4.16 -> 4.07 ms  |
|            | 2-16    | skinny      | bound by reading the weights, depth split until the GPU is full                |
|            | 17-     | library     | 198 us at 256 tokens; a product of our own was slower and is not kept          |
| fp8, int8  | 1       | gemv        | as bf16: 2.77 -> 2.62 ms                                                       |
|            | 2-64    | skinny      | as bf16                                                                        |
|            | 65-     | library     | but skinny for int8 up to 256 and for fp8 up to 128 with K > 8192: the library |
|            |         |             | has no good int8 product of few tokens, none of fp8 that splits the depth      |
| int4       | 1       | gemv        | N <= 8192 and K <= 4096: 2.63 -> 2.37 ms; longer rows do not fit one program   |
|            |         |             | (28,672 rows alone 25.4 -> 23.8 us, but with the gate a step takes 2.56, not   |
|            |         |             | 2.47 ms)                                                                       |
|            | 65-128  | hopper      | 132 us at 128 tokens, hopper_wide 145                                          |
|            | 129-256 | hopper_wide | 198 us at 256 tokens, hopper 225                                               |
|            | 257-512 | hopper      | two and more tiles of 128 tokens                                               |
| int4,      | 1-32    | grouped     | bound by reading the codes; scales are applied to the sums of a group          |
| grouped4,  | 33-128  | grouped     | N <= 8192                                                                      |
| grouped8   | 33-256  | grouped     | N > 8192, or from 129 tokens K > 8192                                          |
|            | others  | library     | expanded to bf16 first: unpacking for every tile of tokens would take longer   |
| w4a8,      | 1-32    | as int4     | bound by reading the codes; float8 inputs are multiplied as float16            |
| w4a8row    | 33-     | grouped_fp8 | 14336 x 4096 at 64, 256, 4,096 tokens 16.8, 42.7, 616 us, int4 33.6, 55.5, 723 |
|            |         |             | w4a8row (one scale per row) from 513 on library: expanded to float8, exactly   |
| w4a8       | 1       | gemv        | N > 8192 and K <= 4096: 13.0 us at 14336 rows, grouped 25.4                    |
|            | 2-32    | grouped_fp8 | N > 8192 and K <= 4096: 15.9 us at 16 tokens, grouped 25.4                     |
| w4a8g32    | 1-      | as grouped4 | groups of 32 (w4a8: 64 and 128): scaling their sums would cost what FP8 saves  |

Of w4a8row and w4a8g32 nothing is measured: their rows follow from counts of instructions. Hopper rows hold where
`on_hopper()`; elsewhere the rows of "int4, grouped4, grouped8" do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from tokenmill.kernels.gpu_generation import GENERIC, generic_is_forced
from tokenmill.kernels.triton.shared.launch import INTERPRETED, num_processors, on_hopper

GEMV, SKINNY, GROUPED, LIBRARY = "gemv", "skinny", "grouped", "library"
HOPPER, HOPPER_WIDE, GROUPED_FP8 = "hopper", "hopper_wide", "grouped_fp8"
KERNELS = (GEMV, SKINNY, GROUPED, GROUPED_FP8, HOPPER, HOPPER_WIDE, LIBRARY)
W4A8 = ("w4a8", "w4a8g32", "w4a8row")
CACHE_VARIABLE = "TOKENMILL_TUNING"  # a file of its own, or "off"
SMALL_ROWS = 8192  # rows of the matrix up to which a product is one of many small tiles
WHOLE_DEPTH = 4096  # of a row that the threads of one program hold in registers
HOPPER_TOKENS = range(65, 513)  # 4-bit groups are worth unpacking beside the tensor cores
W4A16_TOKENS = 32  # up to which float8 inputs of 4-bit groups are multiplied in 16 bits
WIDE_TOKENS = range(129, 257)  # of those, a tile of 256 tokens
FUSED_TOKENS = 32  # a tile of more has no room for two halves of the rows side by side
FOLD_TOKENS = 64  # from this many on, scales of small groups go into the weights: there would be too many sums
EXPANDED_WEIGHTS = 1 << 22  # in all, up to which reading bf16 takes less time than unpacking codes
FULL_WEIGHTS = 1 << 24  # with enough rows of 128 to keep a GPU busy


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut up; `splits` 0: as many programs per tile as fill the GPU."""

    rows: int = 64
    depth: int = 128
    splits: int = 0
    warps: int = 4
    stages: int = 4
    prefetch_lines: int = 0  # 128-byte lines of each row prefetched before the input is ready
    tokens: int = 128  # at most this many in a tile
    preloaded: int = 0  # pieces of `depth` of each row loaded before the input is ready; of products of one token


@dataclass(frozen=True, slots=True)
class Plan:
    """`kernel` is one of KERNELS; "library" is cuBLAS (after expanding, for grouped codes)."""

    kernel: str
    tiling: Tiling = field(default_factory=Tiling)


def bucket(tokens: int) -> int:
    """Token counts that share a plan: powers of two, one and all above 4096 by themselves."""
    return min(8192, triton.next_power_of_2(tokens))


def rule(kind: str, rows: int, depth: int, tokens: int) -> Plan:
    """The plan without measurements: the table of the module's head."""
    if INTERPRETED:
        if kind in W4A8 and tokens > W4A16_TOKENS:
            return Plan(GROUPED_FP8, Tiling(16, 64, 0, 4, 1))
        kernel = GROUPED if kind in ("int4", "grouped4", "grouped8", *W4A8) else GEMV if tokens == 1 else SKINNY
        return Plan(kernel, Tiling(16, 64, 0, 4, 1))
    if kind == "bf16":
        return _bf16_rule(rows, depth, tokens)
    if kind in ("fp8", "int8"):
        return _scaled_rule(kind, rows, depth, tokens)
    if kind in W4A8:
        return _w4a8_rule(kind, rows, depth, tokens)
    return _grouped_rule(kind, rows, depth, tokens)


def _bf16_rule(rows: int, depth: int, tokens: int) -> Plan:
    if tokens == 1:
        return Plan(GEMV, _bf16_gemv(rows, depth))
    return Plan(SKINNY, Tiling(64, 128, 0, 4, 4, 2)) if tokens <= 16 else Plan(LIBRARY)


def router_rule(rows: int, depth: int, tokens: int) -> Plan:
    """As bf16, but skinny for longer: a library's product of so few rows is one of few programs."""
    if INTERPRETED or tokens == 1:
        return rule("bf16", rows, depth, tokens)
    return Plan(SKINNY, Tiling(64, 128, 0, 4, 4, 2 if tokens <= 16 else 0)) if tokens <= 256 else Plan(LIBRARY)


def _bf16_gemv(rows: int, depth: int) -> Tiling:
    """The whole depth of a few rows in registers before the input is there, as far as it fits."""
    if depth > 2 * WHOLE_DEPTH:
        return Tiling(2, 2048, 0, 4, 1, preloaded=3)
    if rows <= 4096:
        return Tiling(2, 2048, 0, 4, 1, 8)
    if depth > WHOLE_DEPTH:
        return Tiling(4, 1024, 0, 2, 1)
    few = SMALL_ROWS < rows <= 65536
    return Tiling(2 if few else 4, triton.next_power_of_2(depth), 0, 4 if rows > 65536 else 8, 1, preloaded=1)


def _scaled_rule(kind: str, rows: int, depth: int, tokens: int) -> Plan:
    if tokens == 1 and depth <= WHOLE_DEPTH:
        return Plan(GEMV, Tiling(4, triton.next_power_of_2(depth), 0, 8 if rows <= 4096 else 4, 1, preloaded=1))
    if tokens == 1:
        return Plan(GEMV, Tiling(8, 1024, 0, 4, 1, 8) if rows <= SMALL_ROWS else Tiling(4, 1024, 0, 2, 1))
    if tokens <= 32:
        return Plan(SKINNY, Tiling(64, 256, 0, 4, 4, 2))
    if tokens <= 64:
        return Plan(SKINNY, Tiling(64, 256, 0, 4, 3))
    skinny = tokens <= 256 if kind == "int8" else tokens <= 128 and depth > 8192
    return Plan(SKINNY, Tiling(64, 128, 0, 4, 4)) if skinny else Plan(LIBRARY)


def _grouped_rule(kind: str, rows: int, depth: int, tokens: int) -> Plan:
    small = rows <= SMALL_ROWS
    if kind == "int4" and tokens == 1 and small and depth <= WHOLE_DEPTH:
        return Plan(GEMV, Tiling(4 if rows > 4096 else 8, warps=4))
    if tokens <= 32:
        return Plan(GROUPED, Tiling(128 if rows * depth >= FULL_WEIGHTS else 64, 0, 0, 4, 3, 2 if tokens <= 16 else 0))
    if kind == "int4" and tokens in HOPPER_TOKENS and on_hopper():
        return Plan(HOPPER_WIDE if tokens in WIDE_TOKENS else HOPPER)
    if small and tokens <= 128:
        return Plan(GROUPED, Tiling(64, 0, 0, 4, 3, 0, 64))
    if tokens > 256 or (small and depth <= 8192):
        return Plan(LIBRARY)
    return Plan(GROUPED, Tiling(128, 0, 0, 8, 3, 0, 64 if tokens <= 64 else 128))


def _w4a8_rule(kind: str, rows: int, depth: int, tokens: int) -> Plan:
    if kind == "w4a8" and tokens <= W4A16_TOKENS and rows > SMALL_ROWS and depth <= WHOLE_DEPTH:
        return Plan(GEMV, Tiling(8, warps=4)) if tokens == 1 else Plan(GROUPED_FP8, Tiling(128, 0, 0, 8, 3))
    if tokens <= W4A16_TOKENS:
        return _grouped_rule("int4", rows, depth, tokens)
    if kind == "w4a8g32":
        return _grouped_rule("grouped4", rows, depth, tokens)
    if kind == "w4a8row" and tokens > 512:
        return Plan(LIBRARY)
    if tokens <= 64:
        return Plan(GROUPED_FP8, Tiling(64, 0, 0, 4, 4, 2, 64))
    # Two small tiles on a processor unpack and multiply by turns; a large one reads each token for twice the rows.
    return Plan(GROUPED_FP8, Tiling(64, 0, 0, 4, 3) if tokens <= 256 else Tiling(128, 0, 0, 8, 3))


def fuses_gate(plan: Plan, rows: int, tokens: int) -> bool:
    """Whether a product by this plan can apply silu(first half of its rows) * second half by itself."""
    if plan.kernel in (HOPPER, HOPPER_WIDE):
        return rows % 256 == 0  # no tile with rows of both halves
    return rows % 2 == 0 and fuses_rotary(plan, tokens)


def fuses_rotary(plan: Plan, tokens: int) -> bool:
    """Whether a product by this plan can rotate its heads and store keys and values by itself."""
    return (plan.kernel == GEMV and tokens == 1) or (plan.kernel == GROUPED and tokens <= FUSED_TOKENS)


def takes_codes(plan: Plan, rows: int, tokens: int) -> bool:
    """Whether a product of 8-bit inputs wants them quantized by its predecessor. With one token only large matrices do,
    whose threads each read all of the input: for the others quantizing is one more thing to wait for."""
    return tokens > 1 or rows > SMALL_ROWS or plan.kernel != GEMV


def folds_scales(group: int, affine: bool, tokens: int, token_tile: int) -> bool:
    """Whether grouped.py multiplies scales into the weights. With groups of 128 that is slower even at 256 tokens, as
    the weights wait for them; with zero points the sums of a large tile do not fit into registers."""
    return tokens >= FOLD_TOKENS and (group < 128 or (affine and token_tile > 64))


def worth_expanding(rows: int, depth: int) -> bool:
    """Whether grouped codes of this shape are multiplied faster once they are bf16: at 1, 5 and 16 tokens by
    measurement (smollm2: 2.6 -> 0.3 ms of a step), with many tokens they are expanded anyway."""
    return rows * depth <= EXPANDED_WEIGHTS


def choose_splits(tiles: int, steps: int, device: torch.device, per_processor: int = 2) -> int:
    """Programs that split the depth of a tile: enough for `per_processor` on each, none with fewer than two steps."""
    wanted = max(1, per_processor * num_processors(device) // max(1, tiles))
    return max(1, min(wanted, steps // 2, 16))


def candidates(kind: str, rows: int, depth: int, tokens: int) -> list[Plan]:
    """The rule's plan and its neighbours."""
    plans = [rule(kind, rows, depth, tokens)]
    if kind in W4A8:
        plans += [Plan(GROUPED_FP8, Tiling(64, 0, 0, 4, 3, 0, 64)), Plan(GROUPED_FP8, Tiling(64, 0, 0, 4, 4, 2, 64))]
        plans += [Plan(GROUPED_FP8, Tiling(64, 0, 0, 4, 3)), Plan(GROUPED_FP8, Tiling(128, 0, 0, 8, 3))]
        kind = "int4"  # and what multiplies its codes in 16 bits
    if kind == "bf16":
        plans += [Plan(LIBRARY)]
        if tokens == 1:
            plans += [Plan(GEMV, Tiling(2, 2048, 0, 4, 1, 8)), Plan(GEMV, Tiling(4, 1024, 0, 2, 1))]
            plans += [Plan(GEMV, Tiling(4, 1024, 0, 4, 1, 8)), Plan(GEMV, Tiling(8, 512, 0, 4, 3))]
        elif tokens <= 32:
            plans += [Plan(SKINNY, Tiling(64, 128, 0, 4, 4, 2)), Plan(SKINNY, Tiling(64, 128, 2, 4, 4, 2))]
    elif kind in ("fp8", "int8"):
        plans += [Plan(LIBRARY), Plan(SKINNY, Tiling(64, 256, 0, 4, 4, 2)), Plan(SKINNY, Tiling(64, 128, 0, 4, 4))]
        if tokens == 1:
            plans += [Plan(GEMV, Tiling(8, 1024, 0, 4, 1, 8)), Plan(GEMV, Tiling(4, 4096, 0, 4, 1, preloaded=1))]
            plans += [Plan(GEMV, Tiling(4, 1024, 0, 2, 1)), Plan(GEMV, Tiling(4, 2048, 0, 4, 3))]
        if tokens > 64:
            plans += [Plan(SKINNY, Tiling(64, 128, 0, 4, 4, 0, 256)), Plan(SKINNY, Tiling(128, 128, 0, 8, 4, 0, 256))]
    else:
        plans += [Plan(GROUPED, Tiling(64, 0, 0, 4, 3, 0, 64)), Plan(GROUPED, Tiling(128, 0, 0, 8, 3, 0, 128))]
        plans += [Plan(LIBRARY)] if tokens > 64 else []
        if kind == "int4" and tokens == 1:
            plans += [Plan(GEMV, Tiling(each, warps=4)) for each in (2, 4, 8, 16) if each * depth <= 16 * WHOLE_DEPTH]
            plans += [Plan(GEMV, Tiling(8, warps=8)), Plan(GEMV, Tiling(4, warps=2))]
        if kind == "int4" and tokens <= 32:
            plans += [Plan(GROUPED, Tiling(each, 0, 0, 4, 4, 2)) for each in (32, 64, 128)]
            plans += [Plan(GROUPED, Tiling(64, 0, 0, 4, 3, 2)), Plan(GROUPED, Tiling(128, 0, 0, 8, 3, 2))]
        if kind == "int4" and tokens > 32 and on_hopper():
            plans += [Plan(HOPPER)] if tokens <= 128 or tokens > 256 else [Plan(HOPPER), Plan(HOPPER_WIDE)]
    return list(dict.fromkeys(plans))


def _cache_path() -> Path | None:
    named = os.environ.get(CACHE_VARIABLE, "")
    if named == "off":
        return None
    if named:
        return Path(named)
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tokenmill" / "tuning"
    return root / "triton.json"


@cache
def _machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    name += f" ({GENERIC} kernels)" if generic_is_forced() else ""
    return f"{name} | torch {torch.__version__} | triton {triton.__version__}"


class PlanTable:
    """Measured plans of one device; reads the file once, rewrites it whole when something new was measured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._path = _cache_path()
        self._plans: dict[str, Plan] = {}
        for key, entry in self._read().get(_machine(device), {}).items():
            plan = _stored_plan(entry)
            if plan is not None:
                self._plans[key] = plan

    def _read(self) -> dict[str, dict[str, dict]]:
        try:
            found = json.loads(self._path.read_text()) if self._path else {}
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def plan(self, kind: str, rows: int, depth: int, tokens: int) -> Plan:
        if not self._plans:
            return rule(kind, rows, depth, tokens)
        return self._plans.get(_key(kind, rows, depth, tokens)) or rule(kind, rows, depth, tokens)

    def measure(self, kind: str, rows: int, depth: int, tokens: int, run: Callable[[Plan], Tensor]) -> Plan:
        """Time every candidate by `run` and keep the best; returns the stored one at once if there is one."""
        key = _key(kind, rows, depth, tokens)
        if key in self._plans:
            return self._plans[key]
        capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        assert not capturing, "plans are measured before a graph is captured"
        plans = candidates(kind, rows, depth, tokens)
        timed = [(time_call(lambda plan=plan: run(plan)), plan) for plan in plans]  # type: ignore[misc]
        best = min(timed, key=lambda pair: pair[0])[1]
        self._plans[key] = best
        self._write()
        return best

    def _write(self) -> None:
        if self._path is None:
            return
        whole = self._read()
        whole[_machine(self._device)] = {key: asdict(plan) for key, plan in self._plans.items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        draft.write_text(json.dumps(whole, indent=1))
        draft.replace(self._path)


def _stored_plan(entry: dict[str, Any]) -> Plan | None:
    """None for an entry of a version whose kernels or tilings were others: the rule answers, or it is measured anew."""
    try:
        plan = Plan(entry["kernel"], Tiling(**entry["tiling"]))
    except (KeyError, TypeError):
        return None
    return plan if plan.kernel in KERNELS else None


def _key(kind: str, rows: int, depth: int, tokens: int) -> str:
    return f"{kind} {rows}x{depth} {bucket(tokens)}"


def time_call(call: Callable[[], Tensor], repeats: int = 5) -> float:
    """Median milliseconds of `call` with cold caches; infinite for one that does not launch."""
    try:
        call()
    except (RuntimeError, triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError):
        return float("inf")
    flush = torch.empty(1 << 26, dtype=torch.int32, device="cuda")  # 256 MB, several times the cache
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


@cache
def plan_table(device: torch.device) -> PlanTable:
    return PlanTable(device)
