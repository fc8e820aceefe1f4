"""Which kernel, cut up how, for a product of a given kind, shape and token count: a rule, or what was measured here.

`Plan`s are looked up by (kind, N, K, token bucket) in a file of the user's cache, keyed by GPU and versions; without an
entry the rule below (fitted to an H200) answers. `measure` times candidates and stores the winner: it is called before
graphs are captured, never inside one. Knows nothing of weights' formats.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import torch
import triton
from torch import Tensor

from tokenmill.kernels.triton.launch import INTERPRETED
from tokenmill.kernels.triton.matmul.skinny import Tiling

VECTOR, SKINNY, GROUPED, HOPPER, LIBRARY = "vector", "skinny", "grouped", "hopper", "library"
CACHE_VARIABLE = "TOKENMILL_TUNING"  # a file of its own, or "off"
WHOLE_DEPTH = 4096  # of a row that the threads of one program hold
MANY = 65  # tokens from which 4-bit groups are worth unpacking beside the tensor cores
SMALL = 1 << 22  # weights in all up to which reading bf16 takes less time than unpacking codes
FULL = 1 << 24  # weights with enough rows of 128 to keep a GPU busy


@dataclass(frozen=True, slots=True)
class Plan:
    """`kernel` is one of the names above; "library" is cuBLAS (after expanding, for grouped codes)."""

    kernel: str
    tiling: Tiling = field(default_factory=Tiling)


@cache
def on_hopper() -> bool:
    """Whether kernels for this generation, written in Gluon as Triton has it since 3.6, run on the current device."""
    if INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)


def bucket(tokens: int) -> int:
    """Token counts that share a plan: powers of two, one and all above 4096 by themselves."""
    return min(8192, triton.next_power_of_2(tokens))


def rule(kind: str, rows: int, depth: int, tokens: int) -> Plan:
    """The plan without measurements. kind: "bf16", "fp8", "int8" or, with groups along the depth, "int4",
    "grouped4" (small or uneven ones), "grouped8"."""
    small = rows <= 8192
    if INTERPRETED:
        kernel = GROUPED if kind in ("int4", "grouped4", "grouped8") else VECTOR if tokens == 1 else SKINNY
        return Plan(kernel, Tiling(16, 64, 0, 4, 1))
    if kind == "bf16":
        if tokens == 1:
            return Plan(VECTOR, _bf16_vector(rows, depth))
        return Plan(SKINNY, Tiling(64, 128, 0, 4, 4, 2)) if tokens <= 16 else Plan(LIBRARY)
    if kind in ("fp8", "int8"):
        if tokens == 1 and depth <= WHOLE_DEPTH:
            return Plan(VECTOR, Tiling(4, triton.next_power_of_2(depth), 0, 8 if rows <= 4096 else 4, 1, held=1))
        if tokens == 1:
            return Plan(VECTOR, Tiling(8, 1024, 0, 4, 1, 8) if small else Tiling(4, 1024, 0, 2, 1))
        if tokens <= 32:
            return Plan(SKINNY, Tiling(64, 256, 0, 4, 4, 2))
        if tokens <= 64:
            return Plan(SKINNY, Tiling(64, 256, 0, 4, 3))
        # The library has no good int8 product of few tokens, and none of fp8 where the depth must be shared out.
        skinny = tokens <= 256 if kind == "int8" else tokens <= 128 and depth > 8192
        return Plan(SKINNY, Tiling(64, 128, 0, 4, 4)) if skinny else Plan(LIBRARY)
    if kind == "int4" and tokens == 1 and small and depth <= WHOLE_DEPTH:
        return Plan(VECTOR, Tiling(4 if rows > 4096 else 8, warps=4))
    if tokens <= 32:
        return Plan(GROUPED, Tiling(128 if rows * depth >= FULL else 64, 0, 0, 4, 3, 2 if tokens <= 16 else 0))
    if kind == "int4" and MANY <= tokens <= 512 and on_hopper():
        return Plan(HOPPER)
    if small and tokens <= 128:
        return Plan(GROUPED, Tiling(64, 0, 0, 4, 3, 0, 64))
    if tokens > 256 or (small and depth <= 8192):
        return Plan(LIBRARY)
    return Plan(GROUPED, Tiling(128, 0, 0, 8, 3, 0, 64 if tokens <= 64 else 128))


def _bf16_vector(rows: int, depth: int) -> Tiling:
    """One token, bf16: the whole depth of a few rows in registers before the input is there, as far as it fits."""
    if depth > 2 * WHOLE_DEPTH:
        return Tiling(2, 2048, 0, 4, 1, held=3)
    if rows <= 4096:
        return Tiling(2, 2048, 0, 4, 1, 8)
    if depth > WHOLE_DEPTH:
        return Tiling(4, 1024, 0, 2, 1)
    few = 8192 < rows <= 65536
    return Tiling(2 if few else 4, triton.next_power_of_2(depth), 0, 4 if rows > 65536 else 8, 1, held=1)


def worth_expanding(rows: int, depth: int) -> bool:
    """Whether grouped codes of this shape are multiplied faster once they are bf16: at 1, 5 and 16 tokens by
    measurement, with many they are expanded anyway."""
    return rows * depth <= SMALL


def candidates(kind: str, rows: int, depth: int, tokens: int) -> list[Plan]:
    """The rule's plan and its neighbours."""
    plans = [rule(kind, rows, depth, tokens)]
    if kind == "bf16":
        plans += [Plan(LIBRARY)]
        if tokens == 1:
            plans += [Plan(VECTOR, Tiling(2, 2048, 0, 4, 1, 8)), Plan(VECTOR, Tiling(4, 1024, 0, 2, 1))]
            plans += [Plan(VECTOR, Tiling(4, 1024, 0, 4, 1, 8)), Plan(VECTOR, Tiling(8, 512, 0, 4, 3))]
        elif tokens <= 32:
            plans += [Plan(SKINNY, Tiling(64, 128, 0, 4, 4, 2)), Plan(SKINNY, Tiling(64, 128, 2, 4, 4, 2))]
    elif kind in ("fp8", "int8"):
        plans += [Plan(LIBRARY), Plan(SKINNY, Tiling(64, 256, 0, 4, 4, 2)), Plan(SKINNY, Tiling(64, 128, 0, 4, 4))]
        if tokens == 1:
            plans += [Plan(VECTOR, Tiling(8, 1024, 0, 4, 1, 8)), Plan(VECTOR, Tiling(4, 4096, 0, 4, 1, held=1))]
            plans += [Plan(VECTOR, Tiling(4, 1024, 0, 2, 1)), Plan(VECTOR, Tiling(4, 2048, 0, 4, 3))]
        if tokens > 64:
            plans += [Plan(SKINNY, Tiling(64, 128, 0, 4, 4, 0, 256)), Plan(SKINNY, Tiling(128, 128, 0, 8, 4, 0, 256))]
    else:
        plans += [Plan(GROUPED, Tiling(64, 0, 0, 4, 3, 0, 64)), Plan(GROUPED, Tiling(128, 0, 0, 8, 3, 0, 128))]
        plans += [Plan(LIBRARY)] if tokens > 64 else []
        if kind == "int4" and tokens == 1:
            plans += [Plan(VECTOR, Tiling(8 if depth <= 4096 else 4, warps=4)), Plan(VECTOR, Tiling(4, warps=4))]
        plans += [Plan(HOPPER)] if kind == "int4" and tokens > 32 and on_hopper() else []
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
    return f"{name} | torch {torch.__version__} | triton {triton.__version__}"


class PlanTable:
    """Measured plans of one device; reads the file once, rewrites it whole when something new was measured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._path = _cache_path()
        self._plans: dict[str, Plan] = {}
        for key, entry in self._read().get(_machine(device), {}).items():
            self._plans[key] = Plan(entry["kernel"], Tiling(**entry["tiling"]))

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
