"""The GPU backend of the op table, in Triton. Importing this package does not import triton; asking for an op does.

Ops of kernels/ref.py, same signatures (activations bf16 or float32, result in the type of the input):
  rms_norm  add  add_rms_norm  gated  softcap  rope  store_kv  attention  argmax  make_linear
Beyond the spec, for executors that fuse (all without host synchronization, shapes alone decide a launch):
  add_rms_norm_quantized(x, y|None, weight, eps, "fp8"|"int8") -> total, codes, scales
  gated_quantized(gate, up, activation, "fp8"|"int8") -> codes, scales         gate, up may be halves of one matrix
  quantize_rows(x, "fp8"|"int8") -> codes, scales                              per token
  embed(ids, table, scale=1.0, dtype=bf16) -> rows
  rope_store(qkv, q_heads, k_pages, v_pages, positions, slots, cos, sin, interleaved, *, norms, eps, scales) -> q
  head_places(tokens, q_heads, k_pages, ..., interleaved, scales) -> HeadPlaces     for products that do this themselves
  paged_attention(q, k_pages, v_pages, block_table, query_starts, seq_lens, scale, window, cap, *, max_query, max_seq,
                  scales, shared: SharedPrefix, distinct: DistinctPages, out)  decode, prefill, mixed, shared prefix
  rope_store_packed(qkv, q_heads, PackedPages, ...)    packed_attention(q, PackedPages, ...)     quantized KV rows
  sample(logits, SamplingTensors, out, Echo) -> ids  mix_seed(seed, index)     temperature, top-k, top-p, min-p
  quantize_at_load(values, bias, "fp8"|"int8"|"int4", group) -> GpuLinear      from_quantized(matrix, bias, device)
  join_linears([GpuLinear, ...]) -> GpuLinear | None        JoinedRows            matrices that share an input, as one
  expand_small([GpuLinear, ...]) -> [GpuLinear, ...]         grouped codes as bf16 where that is faster
  begin_step(...)                                            what a decode step derives from positions and page tables
  follow_drafts(...)                                         what the step after checked drafts begins with
  look_up_drafts(tokens, block_table, seq_lens, drawn, guessed, depth)         what followed the last tokens before
  draft_inputs(hidden, ids, table, scale, eps)               a state and a token's embedding as a draft head reads them
A GpuLinear: `linear(x)`, `.multiply(x, out_dtype)`, `.multiply_quantized(codes, scales)` where `.activations` is set,
`.tune(tokens)` before capture. KV pages: [pages, kv_heads, page_size, head_dim], 16 tokens a page is the tuned size.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

_HOME = {
    "rms_norm": "fused.elementwise",
    "add": "fused.elementwise",
    "add_rms_norm": "fused.elementwise",
    "add_rms_norm_quantized": "fused.elementwise",
    "gated": "fused.elementwise",
    "gated_quantized": "fused.elementwise",
    "quantize_rows": "fused.elementwise",
    "softcap": "fused.elementwise",
    "embed": "fused.elementwise",
    "rope": "fused.rotary",
    "rope_store": "fused.rotary",
    "store_kv": "fused.rotary",
    "head_places": "fused.rotated",
    "attention": "attention.paged",
    "paged_attention": "attention.paged",
    "SharedPrefix": "attention.paged",
    "distinct_pages": "attention.paged_widen",
    "packed_attention": "attention.packed",
    "rope_store_packed": "fused.packed_store",
    "argmax": "step.sampling",
    "sample": "step.sampling",
    "mix_seed": "step.sampling",
    "SamplingTensors": "step.sampling",
    "Echo": "step.sampling",
    "make_linear": "matmul.linear",
    "from_quantized": "matmul.linear",
    "quantize_at_load": "matmul.linear",
    "GpuLinear": "matmul.linear",
    "join_linears": "matmul.joined",
    "JoinedRows": "matmul.joined",
    "expand_small": "matmul.small",
    "begin_step": "step.step",
    "NO_ROW": "step.step",
    "FOLLOWS": "step.step",
    "follow_drafts": "step.follow",
    "draft_inputs": "fused.head_inputs",
    "look_up_drafts": "step.lookup",
}


def unavailable(device: torch.device) -> str | None:
    """Why this backend cannot run on a device; on a CPU only Triton's interpreter can, for tests."""
    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
    if device.type != "cuda" and not (device.type == "cpu" and interpreted):
        return f"runs on NVIDIA GPUs, not on {device.type}"
    if find_spec("triton") is None:
        return "triton is not installed; install tokenmill[gpu]"
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8:
        return "needs compute capability 8.0 or later"
    return None


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
