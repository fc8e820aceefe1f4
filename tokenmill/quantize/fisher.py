"""What a change of a block's output costs at the end of the model: the Fisher information of its hidden states.

To second order the divergence of the logits is a quadratic form of the change; its matrix is the mean outer product of
the gradients of log-probabilities of tokens that the model itself draws. Methods that fit a block's output can weigh
its directions with it instead of treating all alike. One pass down and one back over some sequences of the float
model, the weights of one block in memory at a time. Knows nothing of files; used through edges.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.quantize.divergence import head_logits, run_block
from tokenmill.quantize.source import HEAD, SourceModel

FISHER_SEQUENCES = 16
FISHER_PASSES = 12  # its cost in forward passes of the blocks: down twice, back, and the head
_AT_ONCE = 8
_ROWS = 256  # of logits at a time
_FLOOR = 0.01  # of the mean: directions that never mattered in the sample do not become free


def output_roots(source: SourceModel, sequences: Tensor) -> list[Tensor]:
    """For each block R [hidden, hidden] with |x R|^2 the cost of a change x of its output, on average as that of x."""
    count = min(FISHER_SEQUENCES, sequences.shape[0])
    chosen = sequences[torch.arange(count) * sequences.shape[0] // count]
    width = source.description.hidden_size
    grams = [torch.zeros(width, width) for _ in range(source.num_blocks)]
    table, generator = source.read_edge(HEAD), torch.Generator().manual_seed(0)
    entering = _entering(source, chosen)
    parts = list(torch.arange(count).split(_AT_ONCE))
    slopes = [_head_slopes(source, entering[-1][part].flatten(0, 1), table, generator) for part in parts]
    for index in range(source.num_blocks - 1, -1, -1):
        weights = source.read_block(index)
        for number, part in enumerate(parts):
            grams[index].addmm_(slopes[number].T, slopes[number])
            if index:
                slopes[number] = _block_slopes(source, index, entering[index][part], weights, slopes[number])
    return [_root(gram) for gram in grams]


@torch.no_grad()
def _entering(source: SourceModel, sequences: Tensor) -> list[Tensor]:
    """What enters each block, and the final norm, [sequences, length, hidden] each."""
    entering = [source.embed(sequences)]
    for index in range(source.num_blocks):
        weights = source.read_block(index)
        parts = [
            run_block(source, index, part.flatten(0, 1), weights, sequences.shape[1]).view_as(part)
            for part in entering[-1].split(_AT_ONCE)
        ]
        entering.append(torch.cat(parts))
    return entering


def _head_slopes(source: SourceModel, states: Tensor, table: Tensor, generator: torch.Generator) -> Tensor:
    """Gradients by the states before the final norm, each of the log-probability of one token drawn."""
    slopes = []
    for rows in states.split(_ROWS):
        leaf = rows.detach().requires_grad_()
        with torch.enable_grad():
            logits = head_logits(source, source.decoder.norm.of_tensor(leaf), table)
        found = logits.detach().softmax(-1)
        drawn = torch.multinomial(found, 1, generator=generator)
        slopes += torch.autograd.grad(logits, leaf, found.scatter_add_(-1, drawn, torch.full(drawn.shape, -1.0)))
    return torch.cat(slopes)


def _block_slopes(
    source: SourceModel, index: int, entering: Tensor, weights: dict[str, Tensor], slopes: Tensor
) -> Tensor:
    leaf = entering.flatten(0, 1).detach().requires_grad_()
    with torch.enable_grad():
        output = run_block(source, index, leaf, weights, entering.shape[1])
    return torch.autograd.grad(output, leaf, slopes)[0]


def _root(gram: Tensor) -> Tensor:
    """The symmetric root, scaled so that its square has a mean diagonal of one."""
    values, vectors = torch.linalg.eigh(gram.double())
    values = values / values.mean()
    return ((vectors * values.clamp(min=_FLOOR).sqrt()) @ vectors.T).float()
