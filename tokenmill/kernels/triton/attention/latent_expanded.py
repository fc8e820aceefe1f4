"""Latent attention of long prompts in the expanded form: keys and values of all heads from the rows, then attention.

Absorbed, a pair of query and row costs each head 2 * rank products; expanded nope_dim + rope_dim + value_dim, a third
of that for DeepSeek's shapes. One prompt at a time, by torch's fused attention, from lengths that the host knows: for
steps that are not captured. latent.py calls; which prompts is decided by `prompts_to_expand`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

from tokenmill.kernels.ref_latent import max_absorbed

MAX_PROMPTS = 16  # of a step: more are short, and each is a dozen launches
MAX_VALUES = 1 << 29  # of the keys of one prompt


class Prompt(NamedTuple):
    """A sequence of several tokens in a step."""

    sequence: int
    begin: int  # of its tokens in the step
    end: int
    length: int  # of stored tokens, those of this step included


def prompts_to_expand(starts: Sequence[int], lengths: Sequence[int], keys: Tensor, values: Tensor) -> list[Prompt]:
    """All prompts of a step if each has enough tokens for this form, else none. `keys`, `values`: as in ref_latent."""
    heads, nope_dim, rank = keys.shape
    least = max_absorbed(rank, nope_dim, values.shape[1])
    found = [
        Prompt(number, starts[number], starts[number + 1], length)
        for number, length in enumerate(lengths)
        if starts[number + 1] - starts[number] > 1
    ]
    suits = all(prompt.end - prompt.begin > least and prompt.length * heads * rank <= MAX_VALUES for prompt in found)
    return found if suits and len(found) <= MAX_PROMPTS else []


def attend_expanded(
    prompt: Prompt,
    q: Tensor,
    tails: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    block_table: Tensor,
    scale: float,
    row_scale: Tensor | None,
    out: Tensor,
) -> None:
    """The tokens of one prompt -> their rows of out [T, heads * value_dim]. Others as `latent_paged_attention`."""
    heads, nope_dim, rank = keys.shape
    value_dim, length, count = values.shape[1], prompt.length, prompt.end - prompt.begin
    own = slice(prompt.begin, prompt.end)
    numbers = block_table[prompt.sequence, : -(-length // pages.shape[2])].long()
    rows = pages[numbers].flatten(0, 2)[:length]
    rows = rows.to(q.dtype) if row_scale is None else (rows.float() * row_scale).to(q.dtype)
    latents, shared = rows[:, :rank], rows[:, None, rank:].expand(-1, heads, -1)
    k = torch.cat(((latents @ keys.flatten(0, 1).T).view(length, heads, nope_dim), shared), -1)
    v = (latents @ values.flatten(0, 1).T).view(length, heads, value_dim)
    ends = tails[own].view(count, heads, -1)
    queries = torch.cat((q[own].view(count, heads, -1)[..., :nope_dim], ends), -1)
    width = queries.shape[-1]
    wide = pad(v, (0, max(0, width - value_dim)))  # fused attention wants values as wide as keys
    queries, k, wide = (each.transpose(0, 1)[None] for each in (queries, k, wide))
    whole = count == length
    attended = scaled_dot_product_attention(
        queries, k, wide, attn_mask=None if whole else causal_lower_right(count, length), is_causal=whole, scale=scale
    )
    out[own].view(count, heads, value_dim).copy_(attended[0].transpose(0, 1)[..., :value_dim])
