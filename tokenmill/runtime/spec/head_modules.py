"""The trainable parts of draft heads: small networks over the target's last hidden state. One definition for training
(training.py) and drafting (heads.py).

* Medusa: head i guesses the token i places after the next one, from the hidden state alone; all heads in one pass.
* Eagle-style: guesses the next hidden state from the present one and the token that was chosen, then goes on from its
  own guess. Unlike EAGLE it has no attention layer: its memory is the one hidden state, so it needs no KV pages.

Both guess hidden states, which the target's own final norm and head turn into tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, silu

STATE_EPS = 1e-6
_DROPOUT = 0.1


class MedusaHeads(nn.Module):
    kind = "medusa"

    def __init__(self, hidden_size: int, depth: int, _width: int = 0) -> None:
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

    def __init__(self, hidden_size: int, depth: int, width: int) -> None:
        super().__init__()
        self.depth = depth  # as far as it was trained to go on from its own guesses
        self.join = nn.Linear(2 * hidden_size, hidden_size)
        self.gate = nn.Linear(hidden_size, width, bias=False)
        self.up = nn.Linear(hidden_size, width, bias=False)
        self.down = nn.Linear(width, hidden_size, bias=False)
        nn.init.zeros_(self.down.weight)
        with torch.no_grad():  # to begin with, the next state is the present one
            self.join.weight[:, :hidden_size] = torch.eye(hidden_size)
            self.join.weight[:, hidden_size:] *= 0.1
            self.join.bias.zero_()

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """The hidden state after a token, from the one before it and the token's embedding; [T, hidden] each."""
        x = self.join(torch.cat([_unit(hidden), _unit(embedding)], dim=-1))
        inner = silu(self.gate(_unit(x))) * self.up(_unit(x))
        x = x + self.down(dropout(inner, _DROPOUT, self.training))
        # States differ in size from model to model: that of the last one is a good guess for the next.
        return x * _size(hidden)


HEADS: dict[str, type[MedusaHeads] | type[EagleHead]] = {"medusa": MedusaHeads, "eagle": EagleHead}


def _size(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True).add(STATE_EPS).sqrt()


def _unit(x: Tensor) -> Tensor:
    return x / _size(x)
