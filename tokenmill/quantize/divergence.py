"""How far a model's answers move when some of its weights are changed: the mean KL divergence of the logits, measured.

The float model runs once over short sequences; what enters each block is kept. A change then runs only from the first
block that it touches to the logits, and several changes share the products of the blocks they leave alone. Used by
mixed precision (which tensor deserves its bytes) and by the end-to-end pass; knows nothing of types or files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tokenmill.kernels import ref
from tokenmill.quantize.calibration_ops import CalibrationOps
from tokenmill.quantize.source import EMBEDDING, HEAD, SourceModel

_SCORED_AT_ONCE = 64  # rows of logits in memory at a time
_UNSCORED = 4  # the first tokens of a sequence have too little context to tell models apart


class BlockWeights:
    """Float32 weights of each block, kept where all of them fit into `cache_bytes`, else read again each time."""

    def __init__(self, source: SourceModel, cache_bytes: int) -> None:
        self._source = source
        whole = sum(4 * out * width for out, width in map(source.shape, source.layer_linears()))
        self._keeps = whole <= cache_bytes
        self._kept: dict[int, dict[str, Tensor]] = {}

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        if index not in self._kept:
            tensors = self._source.read_block(index)
            if not self._keeps:
                return tensors
            self._kept[index] = tensors
        return self._kept[index]


class DivergenceProbe:
    """`sequences` [n, length] of token ids: a few hundred tokens rank the tensors of a model."""

    @torch.no_grad()
    def __init__(self, source: SourceModel, sequences: Tensor, weights: BlockWeights) -> None:
        self.source, self._sequences, self.weights = source, sequences, weights
        self._length = sequences.shape[1]
        self._table = source.read_edge(HEAD)
        self._tied = source.description.tie_embeddings
        states = source.embed(sequences).flatten(0, 1)
        self._inputs = [states]  # of each block, and of the final norm
        for index in range(source.num_blocks):
            states = run_block(source, index, states, weights[index], self._length)
            self._inputs.append(states)
        skipped = min(_UNSCORED, self._length // 2)
        self._scored = torch.arange(sequences.numel()).view_as(sequences)[:, skipped:].flatten()
        self._reference = [rows.log_softmax(-1) for rows in self._logits(states, self._table)]

    @property
    def num_tokens(self) -> int:
        return self._sequences.numel()

    @torch.no_grad()
    def measure(self, changes: Sequence[Mapping[str, Tensor]]) -> list[float]:
        """Nats per token of each change: weights by the name of a linear, "model.embed_tokens" or "lm_head"."""
        states: list[Tensor | None] = [self._embedded(change) for change in changes]
        for index in range(self.source.num_blocks):
            names = set(self.weights[index])
            together = []
            for number, change in enumerate(changes):
                touched = {name: change[name] for name in names.intersection(change)}
                if touched:
                    entering = states[number]
                    entering = self._inputs[index] if entering is None else entering
                    states[number] = self._run(index, entering, {**self.weights[index], **touched})
                elif states[number] is not None:
                    together.append(number)
            moved = [each for number in together if (each := states[number]) is not None]
            if moved:
                outputs = self._run(index, torch.cat(moved), self.weights[index]).chunk(len(moved))
                for number, output in zip(together, outputs, strict=True):
                    states[number] = output
        return [self._divergence(change, state) for change, state in zip(changes, states, strict=True)]

    def _run(self, index: int, states: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        return run_block(self.source, index, states, weights, self._length)

    def _embedded(self, change: Mapping[str, Tensor]) -> Tensor | None:
        if EMBEDDING not in change:
            return None
        return self.source.embed(self._sequences, change[EMBEDDING]).flatten(0, 1)

    def _divergence(self, change: Mapping[str, Tensor], state: Tensor | None) -> float:
        table = self._table
        if HEAD in change:
            table = change[HEAD]
        elif self._tied and EMBEDDING in change:
            table = change[EMBEDDING]
        total = 0.0
        outputs = self._logits(self._inputs[-1] if state is None else state, table)
        for logits, reference in zip(outputs, self._reference, strict=True):
            total += float((reference.exp() * (reference - logits.log_softmax(-1))).sum())
        return total / len(self._scored)

    def _logits(self, states: Tensor, table: Tensor) -> Iterator[Tensor]:
        """Of the scored rows, some at a time."""
        for rows in self.source.decoder.norm.of_tensor(states[self._scored]).split(_SCORED_AT_ONCE):
            yield head_logits(self.source, rows, table)


def run_block(source: SourceModel, index: int, states: Tensor, weights: Mapping[str, Tensor], length: int) -> Tensor:
    """Rows [tokens, hidden] of sequences of `length` through one block; differentiable."""
    ops = CalibrationOps(source.names, weights, length, state_shapes=source.state_shapes(index))
    residual, update = source.block(index)(ops, states, None)
    output: Tensor = residual + update
    return output


def final_norm(source: SourceModel, rows: Tensor, weight: Tensor | None = None) -> Tensor:
    """The norm before the head, on the device of the rows; differentiable. `weight`: another one than the model's."""
    norm = source.decoder.norm
    weight = norm.weight.to(rows.device) if weight is None else weight
    if norm.removes_mean:
        return ref.layer_norm(rows, weight, None if norm.bias is None else norm.bias.to(rows.device), norm.eps)
    return ref.rms_norm(rows, weight, norm.eps)


def head_logits(source: SourceModel, rows: Tensor, table: Tensor, ids: Tensor | None = None) -> Tensor:
    """Logits of rows that have passed the final norm. `ids`: of which tokens `table` has the rows; None: of all."""
    d, bias = source.description, source.decoder.head.bias
    logits = (rows * d.logit_scale) @ table.T
    if bias is not None:
        bias = bias.to(rows.device)
        logits = logits + (bias if ids is None else bias[ids])
    return d.logit_softcap * (logits / d.logit_softcap).tanh() if d.logit_softcap else logits


def free_bytes() -> int:
    """Memory of the host that is free now."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0
