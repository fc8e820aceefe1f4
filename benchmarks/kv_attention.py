"""Attention over quantized KV pages on a GPU, against bf16 pages in the same run: times of one layer and bytes read.

    python benchmarks/kv_attention.py [--shapes 64x4096,1x32768] [--heads 32] [--kv-heads 8] [--dim 128] [--json]
                                      [--sweep] [--dtypes int8,int4,turboquant4]

`--sweep`: decode over quantized pages with other tiles than choose.py picks, fastest first. A shape is sequences x
context. Decode: one token of each sequence. Prefill: 2,048 new tokens of one sequence over
the last context. `store` is the pass that rotates and writes one token of each. Times are medians of CUDA graph replays
over pages far larger than the cache; `error` is the distance to attention over the bf16 pages of the same keys; ratios
are bf16's time over this one. Stores that condition keys do so here, by centers of zero and scales of one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from tokenmill.hardware.kv_layout import LayerKV, build_layout
from tokenmill.kernels import triton as gpu
from tokenmill.kernels.triton.attention import choose
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.kvstore.conditioning import KeyConditioning

_PAGE = 16
_STORES = ("bfloat16", "fp8", "int8", "int8_per_token_head", "int4", "int4_per_token_head", "turboquant4")
_DEVICE = torch.device("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="64x4096,1x32768")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--dtypes", default=",".join(_STORES), help="comma-separated; the ratios are to the first")
    options = parser.parse_args()
    rows = []
    for shape in options.shapes.split(","):
        sequences, context = map(int, shape.split("x"))
        torch.manual_seed(0)
        plain: dict[str, Any] = {}
        for name in options.dtypes.split(","):
            if options.sweep:
                _sweep(name, sequences, context, options)
                continue
            measured = _measure(name, sequences, context, options, plain)
            plain = plain or measured
            row = {"shape": shape, "dtype": name} | {key: value for key, value in measured.items() if key != "out"}
            for part in ("decode", "store", "prefill"):
                row[f"{part}_ratio"] = plain[f"{part}_us"] / measured[f"{part}_us"]
            rows.append(row)
            if not options.json:
                print(_line(row), flush=True)
    if options.json:
        print(json.dumps(rows))


def _line(row: dict[str, Any]) -> str:
    numbers = " ".join(f"{key} {value:.4g}" for key, value in row.items() if not isinstance(value, str))
    return f"{row['shape']:10} {row['dtype']:12} {numbers}"


def _sweep(name: str, sequences: int, context: int, options: argparse.Namespace) -> None:
    """Decode times by tile (keys, warps, stages) and programs for each processor that keys are split for."""
    picked, split, found = choose.packed_decode_tile, choose.choose_key_splits, []
    for keys, warps, stages in itertools.product((32, 64, 128), (1, 2, 4), (2, 3)):
        for programs in (4, 8, 16):
            tile = choose.Tile(choose.power_of_two(options.heads // options.kv_heads, 16), keys, warps, stages)
            choose.packed_decode_tile = lambda *_, tile=tile: tile
            choose.choose_key_splits = lambda *by, programs=programs: split(*by[:4], programs)
            try:
                measured = _measure(name, sequences, context, options, {}, decode_only=True)
            except (triton.CompilationError, triton.runtime.errors.OutOfResources) as problem:
                print(f"{name} {tile} {programs}: {type(problem).__name__}", flush=True)
                continue
            found.append((measured["decode_us"], keys, warps, stages, programs))
    choose.packed_decode_tile, choose.choose_key_splits = picked, split
    now = _measure(name, sequences, context, options, {}, decode_only=True)["decode_us"]
    print(f"{sequences}x{context} {name}: {now:.1f} us as chosen; keys, warps, stages, programs:")
    for each, *tile in sorted(found)[:8]:
        print(f"  {each:.1f} us {tile}", flush=True)


def _measure(
    name: str,
    sequences: int,
    context: int,
    options: argparse.Namespace,
    plain: dict[str, Any],
    decode_only: bool = False,
) -> dict[str, Any]:
    heads, kv_heads, dim = options.heads, options.kv_heads, options.dim
    layout = build_layout([LayerKV("full", kv_heads, dim)], _PAGE)
    per_sequence = context // _PAGE
    store = KV_STORES.get(name)(layout, sequences * per_sequence, _DEVICE)
    if store.conditions_keys:
        moment = torch.eye(dim, dtype=torch.float64).expand(kv_heads, dim, dim)
        store.condition_keys(0, KeyConditioning(torch.zeros(kv_heads, dim), torch.ones(kv_heads, dim), moment))
    packed = store.packed_pages(0)
    table = torch.randperm(sequences * per_sequence, device=_DEVICE).int().view(sequences, per_sequence)
    generator = torch.Generator(_DEVICE).manual_seed(1)
    positions = torch.zeros(context, dtype=torch.int64, device=_DEVICE)
    cos, sin = torch.ones(1, dim // 2, device=_DEVICE), torch.zeros(1, dim // 2, device=_DEVICE)
    token_numbers = torch.arange(context, device=_DEVICE)

    def write(qkv: Tensor, slots: Tensor) -> Tensor:
        rotary = (positions[: len(slots)], slots, cos, sin, False)
        if packed is not None:
            return gpu.rope_store_packed(qkv, heads, packed, *rotary)
        return gpu.rope_store(qkv, heads, *store.stored(0), *rotary, scales=store.scales(0))

    def attend(q: Tensor, tables: Tensor, starts: Tensor, lengths: Tensor, longest: int) -> Tensor:
        bounds = {"max_query": longest, "max_seq": context}
        if packed is not None:
            return gpu.packed_attention(q, packed, tables, starts, lengths, dim**-0.5, **bounds)
        pages = store.stored(0)
        return gpu.paged_attention(q, *pages, tables, starts, lengths, dim**-0.5, scales=store.scales(0), **bounds)

    width = (heads + 2 * kv_heads) * dim
    for row in range(sequences):
        qkv = torch.randn(context, width, device=_DEVICE, generator=generator).bfloat16()
        write(qkv, table[row, token_numbers // _PAGE].long() * _PAGE + token_numbers % _PAGE)
    qkv = torch.randn(sequences, width, device=_DEVICE, generator=generator).bfloat16()
    last = table[:, -1].long() * _PAGE + _PAGE - 1
    q = write(qkv, last)
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=_DEVICE)
    lengths = torch.full((sequences,), context, dtype=torch.int32, device=_DEVICE)
    out = attend(q, table, starts, lengths, 1)
    if decode_only:
        return {"decode_us": _time(lambda: attend(q, table, starts, lengths, 1))}
    new = min(2048, context)
    prompt = write(qkv[:1].expand(new, -1).contiguous(), torch.full((new,), -1, device=_DEVICE))
    span = torch.tensor([0, new], dtype=torch.int32, device=_DEVICE)
    reference = plain.get("out", out)
    return {
        "bytes_per_token": store.page_bytes(layout) // _PAGE,
        "decode_us": _time(lambda: attend(q, table, starts, lengths, 1)),
        "store_us": _time(lambda: write(qkv, last)),
        "prefill_us": _time(lambda: attend(prompt, table[:1], span, lengths[:1], new)),
        "error": float((out.float() - reference.float()).norm() / reference.float().norm()),
        "out": out,
    }


def _time(launch: Callable[[], Any], replays: int = 20, inner: int = 5) -> float:
    """Microseconds of one launch."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            launch()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / inner)
    return statistics.median(times)


if __name__ == "__main__":
    main()
