"""The spec: every op in plain torch, float32, as simple as it can be said.

Faster backends are compared with these functions by the conformance tests. Activations are float32 [tokens, width].
KV pages are [pages, kv_heads, page_size, head_dim]. Runs on any device; chosen when nothing faster accepts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenmill.kernels import ref_recurrent
from tokenmill.kernels.ref_codebook import PARTS as CODEBOOK_PARTS
from tokenmill.kernels.ref_codebook import CodebookLinear
from tokenmill.kernels.rounding import INPUT_ROUNDINGS, round_input

if TYPE_CHECKING:
    from tokenmill.kernels.base import StoredWeight

# Rows of a weight expanded to float32 at a time: bounds the extra memory whatever the matrix.
_TILE_VALUES = 1 << 24


def unavailable(_device: torch.device) -> str | None:
    return None


def find_op(name: str) -> Callable[..., Any] | None:
    """An op by its name in the op table."""
    function: Callable[..., Any] | None = globals().get(name) or getattr(ref_recurrent, name, None)
    return function


class RefLinear:
    """Expands the stored weight tile by tile and multiplies; never keeps a float copy of the matrix."""

    backend = "ref"

    def __init__(self, weight: StoredWeight) -> None:
        self.weight = weight
        self.detail = "torch, expanded tile by tile"
        if weight.activations != "none":
            self.detail += f"; input: {INPUT_ROUNDINGS[weight.activations]}"

    @property
    def nbytes(self) -> int:
        return 0

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.weight
        x = round_input(x, weight.activations, weight.input_scale)
        y = x.new_empty(x.shape[0], weight.out_features)
        step = max(1, _TILE_VALUES // weight.in_features)
        for begin in range(0, weight.out_features, step):
            end = min(begin + step, weight.out_features)
            torch.matmul(x, weight.dequantize(begin, end).T, out=y[:, begin:end])
        return y if weight.bias is None else y.add_(weight.bias)


def make_linear(weight: StoredWeight) -> RefLinear | CodebookLinear:
    return CodebookLinear(weight) if weight.parts().keys() >= CODEBOOK_PARTS else RefLinear(weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float, head_dim: int = 0) -> Tensor:
    rows = x.view(-1, head_dim) if head_dim else x
    scaled = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight).view_as(x)


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, rms_norm(total, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, head_dim: int = 0) -> Tensor:
    """Mean removed, deviation made one, over each row or each `head_dim` slice of it; then weight and bias. `weight`
    is as long as a slice, or as a row: one for each head."""
    rows = x.view(x.shape[0], -1, head_dim or x.shape[1])
    centred = rows - rows.mean(-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = scaled * weight.view(-1, rows.shape[2])
    return (y if bias is None else y + bias.view(-1, rows.shape[2])).view_as(x)


def scale(x: Tensor, factor: float) -> Tensor:
    return x * factor


def add_positions(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """A learned embedding of each token's position is added. table: [positions, width]."""
    return x + table[positions]


def activate(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(x)
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(x, approximate="tanh")
    if activation == "sigmoid":
        return torch.sigmoid(x)
    if activation == "gelu":
        return torch.nn.functional.gelu(x)
    positive = torch.relu(x)
    if activation == "relu":
        return positive
    assert activation == "relu2", activation
    return positive.square()


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return activate(gate, activation) * up


def gate_rows(x: Tensor, gate: Tensor) -> Tensor:
    """x [T, width] * sigmoid(gate [T, 1])."""
    return x * gate.sigmoid()


def argmax(logits: Tensor) -> Tensor:
    """Index of the largest value of each row; the first of equals."""
    return logits.argmax(-1)


def softcap(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, head_dim: int, interleaved: bool) -> Tensor:
    """Rotate pairs of the first n numbers of each head: (i, i + n/2), or (2i, 2i + 1) when interleaved. The others
    stay. cos, sin: [positions, n/2]."""
    heads = x.view(x.shape[0], -1, head_dim)
    size = 2 * cos.shape[1]
    rotated, rest = heads[..., :size], heads[..., size:]
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [T, 1, n/2]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        turned = torch.stack((a * c - b * s, b * c + a * s), dim=-1).flatten(-2)
    else:
        a, b = rotated.chunk(2, dim=-1)
        turned = torch.cat((a * c - b * s, b * c + a * s), dim=-1)
    return torch.cat((turned, rest), dim=-1).view_as(x)


def store_kv(x: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Write rows [T, kv_heads * head_dim] to token slots (page * page_size + offset) of `pages`."""
    _, kv_heads, page_size, head_dim = pages.shape
    heads = x.view(-1, kv_heads, head_dim).to(pages.dtype)
    pages[slots // page_size, :, slots % page_size] = heads


def softmax_with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Softmax over the last axis of [kv_heads, group, queries, keys]; the sink of each head joins the denominator."""
    sink = sinks.view(scores.shape[0], scores.shape[1], 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]


def attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    cap: float,
    chunk: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of each sequence's last tokens over its pages. q: [T, heads * head_dim]; returns the same.

    `chunk`: a token sees only its own chunk of this length. `sinks` [heads]: logits that take part in each head's
    softmax and carry no value.
    """
    _, kv_heads, page_size, head_dim = k_pages.shape
    heads = q.view(q.shape[0], -1, head_dim)
    out = torch.empty_like(heads)
    starts, lengths = query_starts.tolist(), seq_lens.tolist()
    for number, length in enumerate(lengths):
        begin, end = starts[number], starts[number + 1]
        num_pages = -(-length // page_size)
        # Pages that left the window are -1 in the table. Page 0 is read instead: the mask hides its keys, its values
        # become zero: they may never have been written, and a weight of zero does not undo a NaN.
        entries = block_table[number, :num_pages]
        ids = entries.clamp(min=0).long()
        kept = (entries >= 0).view(-1, 1, 1, 1)
        k = k_pages[ids].float().transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :length]
        v = v_pages[ids].float().where(kept, 0.0).transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :length]
        query = heads[begin:end].view(end - begin, kv_heads, -1, head_dim)  # [n, kv, group, dim]
        scores = torch.einsum("nkgd,ksd->kgns", query, k) * scale
        if cap:
            scores = torch.tanh(scores / cap) * cap
        position = torch.arange(length - (end - begin), length, device=q.device).unsqueeze(1)
        key = torch.arange(length, device=q.device).unsqueeze(0)
        visible = key <= position
        if window:
            visible &= key > position - window
        if chunk:
            visible &= key >= position - position % chunk
        scores = scores.masked_fill(~visible, float("-inf"))
        probabilities = scores.softmax(-1) if sinks is None else softmax_with_sinks(scores, sinks)
        out[begin:end] = torch.einsum("kgns,ksd->nkgd", probabilities, v).reshape(end - begin, -1, head_dim)
    return out.view_as(q)
