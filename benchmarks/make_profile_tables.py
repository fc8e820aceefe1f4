"""Makes tokenmill/plan/data/h200_profiles.npz from the published op latencies of NVIDIA aiconfigurator (Apache-2.0).

    python benchmarks/make_profile_tables.py FOLDER

FOLDER holds the parquet files of `aic-core/src/aiconfigurator_core/systems/data/h200_sxm` (commit 095f58a5) under the
names listed in SOURCES. Keeps a part of the grid, as half-precision logarithms of milliseconds (error below 0.4 %).
Needs pyarrow; the planner itself needs only numpy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet

PREFIX = "aiconfigurator_h200_sxm__"
SOURCES = {
    "gemm": f"{PREFIX}gemm__vllm__0.24.0__gemm_perf.parquet",
    "decode": f"{PREFIX}attention__vllm__0.24.0__generation_attention_perf.parquet",
    "prefill": f"{PREFIX}attention__vllm__0.24.0__context_attention_perf.parquet",
    "moe": f"{PREFIX}moe__vllm__0.24.0__moe_perf.parquet",
}
PROVENANCE = {
    "device": "h200-sxm",
    "source": "ai-dynamo/aiconfigurator commit 095f58a51c4ca8e61b66ec108d86f223f8d559ce, systems/data/h200_sxm",
    "license": "Apache-2.0",
    "collected_with": "vLLM 0.24.0",
    "date": "2026-11 (made); the tables themselves carry no date",
}
GEMM_ROWS = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 32768]
TARGET = Path(__file__).parent.parent / "tokenmill" / "plan" / "data"


def read(folder: Path, name: str) -> dict[str, list[Any]]:
    table: dict[str, list[Any]] = parquet.read_table(folder / SOURCES[name]).to_pydict()
    return table


def logs(values: Any) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log2(np.asarray(values, dtype=np.float64)).astype(np.float16)


def gemm(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """[dtype, m, n, k]. The block-scaled rows are left out: they time an untuned fallback kernel."""
    table = read(folder, "gemm")
    sizes = sorted(set(table["n"]))
    dtypes = ["bfloat16", "fp8"]
    grid = np.full((len(dtypes), len(GEMM_ROWS), len(sizes), len(sizes)), np.nan)
    index = {size: i for i, size in enumerate(sizes)}
    rows = {m: i for i, m in enumerate(GEMM_ROWS)}
    for dtype, m, n, k, ms in zip(*(table[c] for c in ("gemm_dtype", "m", "n", "k", "latency")), strict=True):
        if m in rows and dtype in dtypes:
            grid[dtypes.index(dtype), rows[m], index[n], index[k]] = ms
    arrays["gemm_ms"] = logs(grid)
    arrays["gemm_sizes"] = np.array(sizes, np.int32)
    arrays["gemm_rows"] = np.array(GEMM_ROWS, np.int32)


def keyed(
    table: dict[str, list[Any]], keys: list[str], axes: list[str], keep: Any
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """(keys [K, fields], values [K, *axes], axis points): one grid for each combination of `keys`."""
    points = [sorted(set(table[axis])) for axis in axes]
    indices = [{value: i for i, value in enumerate(line)} for line in points]
    grids: dict[tuple[Any, ...], np.ndarray] = {}
    for row in range(len(table["latency"])):
        if not keep(table, row):
            continue
        key = tuple(table[name][row] for name in keys)
        grid = grids.setdefault(key, np.full([len(line) for line in points], np.nan))
        grid[tuple(index[table[axis][row]] for index, axis in zip(indices, axes, strict=True))] = table["latency"][row]
    names = sorted(grids)
    return np.array(names, np.int32), logs([grids[name] for name in names]), [np.array(line) for line in points]


def attention(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Decode: [head_dim, kv_heads, heads, kv bytes] -> [batch, context]; prefill at batch 1: ... -> [length]."""
    for name, axes in (("decode", ["batch_size", "step"]), ("prefill", ["isl"])):
        table = read(folder, name)
        table["kv_bytes"] = [1 if dtype == "fp8" else 2 for dtype in table["kv_cache_dtype"]]

        def keep(rows: dict[str, list[Any]], row: int, phase: str = name) -> bool:
            plain = rows["window_size"][row] == 0 and rows["kernel_source"][row] == "vllm_flash_attn_fa3"
            heads, kv_heads = rows["num_heads"][row], rows["num_key_value_heads"][row]
            if phase == "prefill":
                return plain and rows["batch_size"][row] == 1 and kv_heads <= heads
            return plain and heads // kv_heads in (1, 2, 4, 6, 8, 16)

        keys, values, points = keyed(table, ["head_dim", "num_key_value_heads", "num_heads", "kv_bytes"], axes, keep)
        arrays[f"{name}_keys"], arrays[f"{name}_ms"] = keys, values
        for axis, line in zip(axes, points, strict=True):
            arrays[f"{name}_{axis}"] = line.astype(np.int32)


def experts(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """[hidden, width, per token, experts, dtype, tp, ep] -> [tokens], routing skewed by a power law (1.01)."""
    table = read(folder, "moe")
    dtypes = {"bfloat16": 0, "fp8": 1, "fp8_block": 2, "w4a16_mxfp4": 3, "int4_wo": 4}
    table["dtype"] = [dtypes[dtype] for dtype in table["moe_dtype"]]
    keys = ["hidden_size", "inter_size", "topk", "num_experts", "dtype", "moe_tp_size", "moe_ep_size"]

    def keep(rows: dict[str, list[Any]], row: int) -> bool:
        return bool(rows["distribution"][row] == "power_law_1.01")

    arrays["moe_keys"], arrays["moe_ms"], (tokens,) = keyed(table, keys, ["num_tokens"], keep)
    arrays["moe_tokens"] = tokens.astype(np.int32)


def main() -> None:
    folder = Path(sys.argv[1])
    arrays: dict[str, np.ndarray] = {}
    gemm(folder, arrays)
    attention(folder, arrays)
    experts(folder, arrays)
    target = TARGET / "h200_profiles.npz"
    np.savez_compressed(target, **arrays)
    (TARGET / "h200_profiles.json").write_text(json.dumps(PROVENANCE, indent=2) + "\n", encoding="utf-8")
    print(f"{target}: {target.stat().st_size} bytes")
    for name, array in arrays.items():
        print(f"  {name} {array.shape}")


if __name__ == "__main__":
    main()
