"""What compile_gpu_kernels.py compiles of attention over quantized KV pages: stores, decode steps and prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

STORES = ("int8", "int8_per_token_head", "int4", "int4_per_token_head", "turboquant4")
STEPS = {"decode 1": [1], "decode 64": [1] * 64, "mixed": [1, 200, 1, 1500]}


def packed_cases(batch: Callable[..., Any]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Llama-3.1-8B (heads of 128, groups of four) and one with heads of 64. `batch`: as in gpu_float16_cases.py."""
    from tokenmill.hardware.kv_layout import LayerKV, build_layout
    from tokenmill.kernels import triton as gpu
    from tokenmill.kernels.packed_pages import PackedPages
    from tokenmill.model.kvstore import KV_STORES

    for name in STORES:
        for heads, kv_heads, dim in ((32, 8, 128), (9, 3, 64)):
            layout = build_layout([LayerKV("full", kv_heads, dim)], 16)
            row = KV_STORES.get(name).formats(layout)[0]
            plane = torch.empty(4, kv_heads, 16 * row.row_bytes, dtype=torch.uint8)
            pages = PackedPages(plane, plane, 16, row.packed(torch.device("cpu")))
            for step, counts in STEPS.items():
                tokens = sum(counts)
                q = torch.empty(tokens, heads * dim, dtype=torch.bfloat16)
                yield f"packed {name} {dim} {step}", partial(gpu.packed_attention, q, pages, *batch(counts, 16), 0.1)
            x = torch.empty(64, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16)
            places, angles = torch.zeros(64, dtype=torch.int64), torch.empty(16, dim // 2)
            call = partial(gpu.rope_store_packed, x, heads, pages, places, places, angles, angles, False)
            yield f"packed {name} {dim} store", call
