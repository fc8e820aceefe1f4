"""The trainable parts of draft heads: small networks over the target's last hidden state. One definition for training
(training.py) and drafting (heads.py).

* Medusa: head i predicts the token i positions after the next one, from the hidden state alone; all heads in one pass.
* Eagle-style: predicts the next hidden state from the current one and the sampled token, then continues from its own
  prediction. Unlike EAGLE it computes no keys and values: with `layers`, its queries attend to the KV pages of those
  layers of the target, up to the last known state, so it needs no pages and no prefill.

Both predict hidden states, from which the target's own final norm and head compute tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, silu

STATE_EPS = 1e-6
_DROPOUT = 0.1

# Queries [T, layers * heads * head_dim] before rotary positions -> attention outputs of the same shape.
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
        """`layers`: of the target, whose keys and values the head attends to, each with queries of `query_width`."""
        super().__init__()
        self.depth = depth  # tokens ahead that it was trained for
        self.layers = layers
        self.join = nn.Linear(2 * hidden_size, hidden_size)
        self.gate = nn.Linear(hidden_size, width, bias=False)
        self.up = nn.Linear(hidden_size, width, bias=False)
        self.down = nn.Linear(width, hidden_size, bias=False)
        nn.init.zeros_(self.down.weight)
        if layers:  # query and output projections of the attention; their names are in the weight files
            self.ask = nn.Linear(hidden_size, len(layers) * query_width, bias=False)
            self.take = nn.Linear(len(layers) * query_width, hidden_size, bias=False)
            nn.init.zeros_(self.take.weight)
        with torch.no_grad():  # initially the next state is predicted to be the current one
            self.join.weight[:, :hidden_size] = torch.eye(hidden_size)
            self.join.weight[:, hidden_size:] *= 0.1
            self.join.bias.zero_()

    def forward(self, hidden: Tensor, embedding: Tensor, attend: Attend | None) -> Tensor:
        """The hidden state after a token, from the one before it and the token's embedding; [T, hidden] each."""
        x = self.join(torch.cat([_normalized(hidden), _normalized(embedding)], dim=-1))
        if self.layers:
            assert attend is not None, "a head with layers attends to pages"
            x = x + self.take(attend(self.ask(_normalized(x))))
        inner = silu(self.gate(_normalized(x))) * self.up(_normalized(x))
        x = x + self.down(dropout(inner, _DROPOUT, self.training))
        # The magnitude of states differs between models: that of the last state is a good prediction.
        return x * _rms(hidden)


HEAD_KINDS = ("eagle", "medusa")


def build_head(
    kind: str, hidden_size: int, depth: int, width: int, layers: tuple[int, ...] = (), query_width: int = 0
) -> MedusaHeads | EagleHead:
    if kind == "medusa":
        return MedusaHeads(hidden_size, depth)
    return EagleHead(hidden_size, depth, width, layers, query_width)


def _rms(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True).add(STATE_EPS).sqrt()


def _normalized(x: Tensor) -> Tensor:
    return x / _rms(x)
