"""The trainable parts of draft heads: small networks over the target's last hidden state. One definition for training
(training.py) and drafting (heads.py).

* Medusa: head i guesses the token i places after the next one, from the hidden state alone; all heads in one pass.
* Eagle-style: guesses the next hidden state from the present one and the token that was chosen, then goes on from its
  own guess. Unlike EAGLE it computes no keys and values: where it has `layers`, its own queries look at what those
  layers of the target have in the KV pages, up to the last known state, so it needs no pages and no prefill.

Both guess hidden states, which the target's own final norm and head turn into tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, silu

STATE_EPS = 1e-6
_DROPOUT = 0.1

# Queries [T, layers * heads * head_dim], not yet rotated to their position -> what they find, in the same shape.
Attend = Callable[[Tensor], Tensor]


class MedusaHeads(nn.Module):
    kind = "medusa"
    layers: tuple[int, ...] = ()

    def __init__(self, hidden_size: int, depth: int) -> None:
        super().__init__()
        self.depth = depth
        linears = [nn.Linear(hidden_size, hidden_size) for _ in range(depth)]
        for head in linears:
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
        self.heads = nn.ModuleList(linears)

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, hidden] -> [T, depth, hidden]."""
        return torch.stack([hidden + silu(head(hidden)) for head in self.heads], dim=1)


class EagleHead(nn.Module):
    kind = "eagle"

    def __init__(
        self, hidden_size: int, depth: int, width: int, layers: tuple[int, ...] = (), query_width: int = 0
    ) -> None:
        """`layers`: of the target, whose keys and values are looked at, by queries of `query_width` for each."""
        super().__init__()
        self.depth = depth  # as far as it was trained to go on from its own guesses
        self.layers = layers
        self.join = nn.Linear(2 * hidden_size, hidden_size)
        self.gate = nn.Linear(hidden_size, width, bias=False)
        self.up = nn.Linear(hidden_size, width, bias=False)
        self.down = nn.Linear(width, hidden_size, bias=False)
        nn.init.zeros_(self.down.weight)
        if layers:
            self.ask = nn.Linear(hidden_size, len(layers) * query_width, bias=False)
            self.take = nn.Linear(len(layers) * query_width, hidden_size, bias=False)
            nn.init.zeros_(self.take.weight)
        with torch.no_grad():  # to begin with, the next state is the present one
            self.join.weight[:, :hidden_size] = torch.eye(hidden_size)
            self.join.weight[:, hidden_size:] *= 0.1
            self.join.bias.zero_()

    def forward(self, hidden: Tensor, embedding: Tensor, attend: Attend | None) -> Tensor:
        """The hidden state after a token, from the one before it and the token's embedding; [T, hidden] each."""
        x = self.join(torch.cat([_unit(hidden), _unit(embedding)], dim=-1))
        if self.layers:
            assert attend is not None, "a head with layers looks at pages"
            x = x + self.take(attend(self.ask(_unit(x))))
        inner = silu(self.gate(_unit(x))) * self.up(_unit(x))
        x = x + self.down(dropout(inner, _DROPOUT, self.training))
        # States differ in size from model to model: that of the last one is a good guess for the next.
        return x * _size(hidden)


HEAD_KINDS = ("eagle", "medusa")


def build_head(
    kind: str, hidden_size: int, depth: int, width: int, layers: tuple[int, ...] = (), query_width: int = 0
) -> MedusaHeads | EagleHead:
    if kind == "medusa":
        return MedusaHeads(hidden_size, depth)
    return EagleHead(hidden_size, depth, width, layers, query_width)


def _size(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True).add(STATE_EPS).sqrt()


def _unit(x: Tensor) -> Tensor:
    return x / _size(x)
