"""Attention within each text of a packed batch, in both directions, with an optional window.

Where a kernel reads packed rows it is one launch (Triton, kernels/triton/attention/encoder.py). Elsewhere texts of
one length are one call of torch's attention: no padding, and few calls, since texts are sorted by length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.kernels import triton as gpu
from tokenmill.model.encoders.packed import PackedTexts


def attend(qkv: Tensor, batch: PackedTexts, num_heads: int, window: int, kernel: bool) -> Tensor:
    """qkv [T, 3 x hidden], rows of queries, keys and values side by side -> [T, hidden]."""
    if kernel:
        out: Tensor = gpu.encoder_attention(qkv, batch.starts, batch.max_length, num_heads, window)
        return out
    return grouped_attention(qkv, batch, num_heads, window)


def grouped_attention(qkv: Tensor, batch: PackedTexts, num_heads: int, window: int) -> Tensor:
    hidden = qkv.shape[1] // 3
    out = qkv.new_empty(qkv.shape[0], hidden)
    for group in batch.groups:
        count, length = group.count, group.length
        rows = qkv[group.start : group.end].view(count, length, 3, num_heads, hidden // num_heads)
        queries, keys, values = rows.permute(2, 0, 3, 1, 4)
        mask = _window_mask(length, window, qkv) if window and length > window + 1 else None
        mixed = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        out[group.start : group.end].view(count, length, num_heads, -1).copy_(mixed.transpose(1, 2))
    return out


def _window_mask(length: int, window: int, like: Tensor) -> Tensor:
    """[length, length], added to scores: minus infinity where a token is more than `window` away."""
    places = torch.arange(length, device=like.device)
    far = (places[:, None] - places[None, :]).abs() > window
    return torch.zeros(length, length, dtype=like.dtype, device=like.device).masked_fill_(far, float("-inf"))
