"""A draft head inside a captured decode step: bf16 products and the GPU's own kernels, nothing that waits for the host.

Guesses for every row of a step, as if its drawn token were accepted; which row that is, is found out later. Scales of
guessed states are left out: all that reads them brings them to length one first. Used by the graph executor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenmill.kernels import triton as gpu
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.cuda_ops import FEW_ROWS, multiply
from tokenmill.runtime.spec.head_modules import STATE_EPS, EagleHead, MedusaHeads


class CapturedHead:
    def __init__(self, head: MedusaHeads | EagleHead, model: LoadedModel, depth: int) -> None:
        assert model.table is not None, "weights of a GPU"
        self.depth = min(depth, head.depth)
        self._table, decoder = model.table, model.decoder
        self._scale, self._norm, self._eps = (
            decoder.description.embedding_scale,
            decoder.norm,
            decoder.description.norm_eps,
        )
        assert decoder.head.kernel is not None, "the head is always multiplied"
        self._words: Any = decoder.head.kernel.run
        self._ones = torch.ones(self._table.shape[1], device=model.where)
        self._eagle = None if isinstance(head, MedusaHeads) else _Eagle(head)
        if isinstance(head, MedusaHeads):
            linears: list[Any] = list(head.heads)[: self.depth]
            self._weight = torch.cat([each.weight for each in linears]).detach().bfloat16()
            self._bias = torch.cat([each.bias for each in linears]).detach().bfloat16()

    def guess(self, hidden: Tensor, last: Tensor) -> Tensor:
        """hidden [R, hidden] bf16, before the final norm; last int64 [R]: the token drawn there -> int64 [R, depth]."""
        if self._eagle is None:
            moved = torch.nn.functional.silu(torch.addmm(self._bias, hidden, self._weight.T))
            states = hidden[:, None] + moved.view(hidden.shape[0], self.depth, -1)
            return self._best(states.flatten(0, 1)).view(-1, self.depth)
        found = []
        for _ in range(self.depth):
            embedded = gpu.embed(last, self._table, self._scale)
            hidden = self._eagle.forward(self._unit(hidden), self._unit(embedded), self._unit)
            last = self._best(hidden)
            found.append(last)
        return torch.stack(found, 1)

    def _unit(self, x: Tensor) -> Tensor:
        y: Tensor = gpu.rms_norm(x, self._ones, STATE_EPS)
        return y

    def _best(self, states: Tensor) -> Tensor:
        normed = gpu.rms_norm(states, self._norm, self._eps)
        few = states.shape[0] <= FEW_ROWS
        ids: Tensor = gpu.argmax(multiply(self._words, normed, torch.float32 if few else torch.bfloat16))
        return ids


class _Eagle:
    """EagleHead.forward without the scale of its result."""

    def __init__(self, head: EagleHead) -> None:
        self._join, self._bias = head.join.weight.detach().bfloat16(), head.join.bias.detach().bfloat16()
        self._gate_up = torch.cat([head.gate.weight, head.up.weight]).detach().bfloat16()
        self._down = head.down.weight.detach().bfloat16()
        self._width = head.gate.weight.shape[0]

    def forward(self, hidden: Tensor, embedded: Tensor, unit: Any) -> Tensor:
        x = torch.addmm(self._bias, torch.cat([hidden, embedded], 1), self._join.T)
        both = unit(x) @ self._gate_up.T
        inner = gpu.gated(both[:, : self._width], both[:, self._width :], "silu")
        return torch.addmm(x, inner, self._down.T)
