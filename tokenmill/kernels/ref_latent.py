"""The spec of latent attention (DeepSeek's MLA) in plain torch, float32; ref.py holds the other ops.

A token is kept as one row [rank + rope_dim]: its latent and one rotated key, the same for all heads. Pages are [pages,
1, page_size, rank + rope_dim]. The projections of the heads are `keys` [heads, nope_dim, rank] and `values` [heads,
value_dim, rank], of any float type. A head's query is [nope_dim | rope_dim].
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.kernels.ref import attention, rms_norm, rope


def latent_rows(
    kv: Tensor, norm: Tensor, eps: float, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    """What is kept of each token, from its projection [T, rank + rope_dim]: the latent normed, the key rotated."""
    rank = norm.shape[0]
    key = kv[:, rank:].contiguous()
    return torch.cat(
        (rms_norm(kv[:, :rank], norm, eps), rope(key, positions, cos, sin, key.shape[1], interleaved)), dim=1
    )


def rotate_tails(q: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, head_dim: int, interleaved: bool) -> Tensor:
    """Queries [T, heads * head_dim] with the last rope_dim numbers of each head rotated."""
    rope_dim = 2 * cos.shape[1]
    heads = q.view(q.shape[0], -1, head_dim)
    tails = heads[..., head_dim - rope_dim :].reshape(q.shape[0], -1)
    rotated = rope(tails, positions, cos, sin, rope_dim, interleaved).view(*heads.shape[:2], rope_dim)
    return torch.cat((heads[..., : head_dim - rope_dim], rotated), dim=-1).view_as(q)


def absorb(q: Tensor, keys: Tensor) -> Tensor:
    """Rotated queries [T, heads * (nope_dim + rope_dim)] -> queries over rows [T, heads * (rank + rope_dim)]."""
    num_heads, nope_dim, _ = keys.shape
    heads = q.view(q.shape[0], num_heads, -1)
    latent = torch.einsum("thp,hpl->thl", heads[..., :nope_dim], keys.float())
    return torch.cat((latent, heads[..., nope_dim:]), dim=-1).flatten(1)


def project(attended: Tensor, values: Tensor) -> Tensor:
    """Sums of rows [T, heads * (rank + rope_dim)] -> [T, heads * value_dim]: the values are in the latent part."""
    num_heads, _, rank = values.shape
    latent = attended.view(attended.shape[0], num_heads, -1)[..., :rank]
    return torch.einsum("thl,hvl->thv", latent, values.float()).flatten(1)


def expand(latents: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """[T, rank] -> keys [T, heads, nope_dim] (without the shared rotated part) and values [T, heads, value_dim]."""
    return (
        torch.einsum("tl,hpl->thp", latents, keys.float()),
        torch.einsum("tl,hvl->thv", latents, values.float()),
    )


def max_absorbed(rank: int, nope_dim: int, value_dim: int) -> int:
    """Up to so many queries of a sequence, attending over the rows is less arithmetic than expanding them first."""
    expansion = rank * (nope_dim + value_dim)  # products per row and head
    more = 2 * rank - nope_dim - value_dim  # by which a query and row cost more when absorbed
    return expansion // more if more > 0 else 1 << 30


def latent_attention(
    q: Tensor,
    pages: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention of each sequence's last tokens over its rows. q: [T, heads * (nope_dim + rope_dim)], rotated;
    returns [T, heads * value_dim]. Each sequence is computed in the form that takes less arithmetic."""
    num_heads, value_dim, rank = values.shape
    most = max_absorbed(rank, keys.shape[1], value_dim)
    out = q.new_empty(q.shape[0], num_heads * value_dim)
    starts = query_starts.tolist()
    for number in range(len(starts) - 1):
        begin, end = starts[number], starts[number + 1]
        attend = attend_absorbed if end - begin <= most else attend_expanded
        one = (block_table[number : number + 1], seq_lens[number : number + 1])
        out[begin:end] = attend(q[begin:end], pages, *one, keys, values, scale)
    return out


def attend_absorbed(
    q: Tensor, pages: Tensor, block_table: Tensor, seq_lens: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    """Of one sequence, over the rows themselves."""
    starts = torch.tensor([0, q.shape[0]], dtype=torch.int32)
    attended = attention(absorb(q, keys), pages, pages, block_table, starts, seq_lens, scale, 0, 0.0)
    return project(attended, values)


def attend_expanded(
    q: Tensor, pages: Tensor, block_table: Tensor, seq_lens: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    """Of one sequence, over the keys and values of every head."""
    num_heads, _, rank = values.shape
    length, count = int(seq_lens[0]), q.shape[0]
    ids = block_table[0, : -(-length // pages.shape[2])].long()
    rows = pages[ids].float().flatten(0, 2)[:length]
    k, v = expand(rows[:, :rank], keys, values)
    shared = rows[:, None, rank:].expand(-1, num_heads, -1)
    k = torch.cat((k, shared), dim=-1)
    scores = torch.einsum("nhd,shd->hns", q.view(count, num_heads, -1), k) * scale
    position = torch.arange(length - count, length, device=q.device).unsqueeze(1)
    hidden = torch.arange(length, device=q.device).unsqueeze(0) > position
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hns,shv->nhv", weights, v).flatten(1)
