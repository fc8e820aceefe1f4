"""What a change of a block's output costs at the end of the model: the Fisher information of its hidden states.

To second order the divergence of the logits is a quadratic form of the change; its matrix is the mean outer product of
the gradients of log-probabilities of tokens that the model itself draws. Methods that fit a block's output can weigh
its directions with it instead of treating all alike; of the outputs of single linears it is one of the two factors of
what their errors cost (methods/refine.py). One pass down and one back over some sequences of the float
model, the weights of one block in memory at a time; what is computed is on a device, what is kept on the host. Knows
nothing of files; used through edges.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tokenmill.model.formats.base import LinearWeight
from tokenmill.quantize.base import OutputTurn
from tokenmill.quantize.calibration_ops import CalibrationOps
from tokenmill.quantize.divergence import final_norm, head_logits, run_block
from tokenmill.quantize.source import HEAD, SourceModel

_HOST = torch.device("cpu")
FISHER_SEQUENCES = 16
GRAM_SEQUENCES = 64  # of linears, which are wider than the states
FISHER_PASSES = 12  # its cost in forward passes of the blocks: down twice, back, and the head
GRAM_PASSES = 19  # the same of linears, with more products
_AT_ONCE = 8
_WHOLE, _TILE = 1024, 256  # rows whose Gram matrix is kept whole; of more rows tiles along its diagonal
_ROWS = 256  # of logits at a time
_FLOOR = 0.01  # of the mean: directions that never mattered in the sample do not become free


def output_roots(source: SourceModel, sequences: Tensor, device: torch.device = _HOST) -> list[Tensor]:
    """For each block R [hidden, hidden] with |x R|^2 the cost of a change x of its output, on average as that of x."""
    width = source.description.hidden_size
    grams = [torch.zeros(width, width, device=device) for _ in range(source.num_blocks)]
    for index, slopes, _ in _backwards(source, sequences, FISHER_SEQUENCES, [], device):
        grams[index].addmm_(slopes.T, slopes)
    return [_root(gram).to(_HOST) for gram in grams]


def linear_grams(
    source: SourceModel, sequences: Tensor, device: torch.device = _HOST, turns: Sequence[OutputTurn] = ()
) -> dict[str, Tensor]:
    """For each linear the mean outer product of the gradients by its output, [out, out]; of more than 1,024 outputs
    [out, 256], the tiles along its diagonal. `turns`: orthogonal, what transforms will do to the outputs."""
    names = list(source.layer_linears())
    grams, tokens = {}, 0
    for name in names:
        rows = source.shape(name)[0]
        grams[name] = torch.zeros(rows, _gram_width(rows), device=device)
    for index, by_block, by_output in _backwards(source, sequences, GRAM_SEQUENCES, names, device):
        for name, slopes in by_output.items():
            for turn in turns:
                slopes = turn(index, source.groups(index), name, slopes)
            tile = grams[name].shape[1]
            for begin in range(0, slopes.shape[1], tile):
                part = slopes[:, begin : begin + tile]
                grams[name][begin : begin + tile, : part.shape[1]].addmm_(part.T, part)
        tokens += len(by_block) if index == 0 else 0
    return {name: (gram / tokens).to(_HOST) for name, gram in grams.items()}


def gram_bytes(source: SourceModel) -> int:
    """Of `linear_grams`, which are held for the whole job."""
    heights = [source.shape(name)[0] for name in source.layer_linears()]
    return sum(4 * rows * _gram_width(rows) for rows in heights)


def gradient_bytes(
    source: SourceModel, block_bytes: int, sequence_bytes: int, count: int, length: int
) -> tuple[int, int]:
    """(where it is computed, on the host besides): of a pass down and back over `count` sequences. `block_bytes`: a
    block's weights as floats; `sequence_bytes`: of one sequence in a block, some three of which autograd keeps."""
    d = source.description
    states = 4 * length * d.hidden_size
    logits = 3 * 4 * _ROWS * d.vocab_size
    computed = 4 * d.vocab_size * d.hidden_size + block_bytes + logits + 3 * min(count, _AT_ONCE) * sequence_bytes
    return computed + count * states, count * states * (source.num_blocks + 1)


def _gram_width(rows: int) -> int:
    return rows if rows <= _WHOLE else _TILE


def _backwards(
    source: SourceModel, sequences: Tensor, count: int, watched: Sequence[str], device: torch.device
) -> Iterator[tuple[int, Tensor, Mapping[str, Tensor]]]:
    """Blocks from the last to the first, some sequences at a time: gradients by the block's output, and by those of the
    linears that are watched."""
    count = min(count, sequences.shape[0])
    chosen = sequences[torch.arange(count) * sequences.shape[0] // count]
    table, generator = source.read_edge(HEAD).to(device), torch.Generator(device).manual_seed(0)
    entering = _entering(source, chosen, device)
    parts = [slice(begin, begin + _AT_ONCE) for begin in range(0, count, _AT_ONCE)]
    slopes = [_head_slopes(source, entering[-1][part].to(device).flatten(0, 1), table, generator) for part in parts]
    for index in range(source.num_blocks - 1, -1, -1):
        weights = _block_weights(source, index, device)
        for number, part in enumerate(parts):
            by_output: Mapping[str, Tensor] = {}
            before = slopes[number]
            if index or watched:
                slopes[number], by_output = _block_slopes(
                    source, index, entering[index][part].to(device), weights, before, watched
                )
            yield index, before, by_output


@torch.no_grad()
def _entering(source: SourceModel, sequences: Tensor, device: torch.device) -> list[Tensor]:
    """What enters each block, and the final norm, [sequences, length, hidden] each."""
    entering = [source.embed(sequences)]
    for index in range(source.num_blocks):
        weights = _block_weights(source, index, device)
        parts = [
            run_block(source, index, part.to(device).flatten(0, 1), weights, sequences.shape[1]).view_as(part)
            for part in entering[-1].split(_AT_ONCE)
        ]
        entering.append(torch.cat(parts).to(_HOST))
    return entering


def _block_weights(source: SourceModel, index: int, device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in source.read_block(index).items()}


def _head_slopes(source: SourceModel, states: Tensor, table: Tensor, generator: torch.Generator) -> Tensor:
    """Gradients by the states before the final norm, each of the log-probability of one token drawn."""
    slopes = []
    for rows in states.split(_ROWS):
        leaf = rows.detach().requires_grad_()
        with torch.enable_grad():
            logits = head_logits(source, final_norm(source, leaf), table)
        found = logits.detach().softmax(-1)
        drawn = torch.multinomial(found, 1, generator=generator)
        found.scatter_add_(-1, drawn, torch.full_like(drawn, -1.0, dtype=found.dtype))
        slopes += torch.autograd.grad(logits, leaf, found)
    return torch.cat(slopes)


class _WatchedOutputs(CalibrationOps):
    """Keeps what the linears put out."""

    outputs: dict[str, Tensor]

    def linear(self, x: Tensor, weights: Sequence[LinearWeight]) -> list[Tensor]:
        outputs = super().linear(x, weights)
        self.outputs |= {self._names[id(weight)]: output for weight, output in zip(weights, outputs, strict=True)}
        return outputs


def _block_slopes(
    source: SourceModel,
    index: int,
    entering: Tensor,
    weights: dict[str, Tensor],
    slopes: Tensor,
    watched: Sequence[str],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Gradients by what enters the block, and by the outputs of watched linears."""
    leaf = entering.flatten(0, 1).detach().requires_grad_()
    ops = _WatchedOutputs(source.names, weights, entering.shape[1], state_shapes=source.state_shapes(index))
    ops.outputs = {}
    with torch.enable_grad():
        residual, update = source.block(index)(ops, leaf, None)
        output = residual + update
    seen = {name: value for name, value in ops.outputs.items() if name in watched}
    found = torch.autograd.grad(output, [leaf, *seen.values()], slopes, allow_unused=True)
    return found[0], {name: each for name, each in zip(seen, found[1:], strict=True) if each is not None}


def _root(gram: Tensor) -> Tensor:
    """The symmetric root, scaled so that its square has a mean diagonal of one."""
    values, vectors = torch.linalg.eigh(gram.double())
    values = values / values.mean()
    return ((vectors * values.clamp(min=_FLOOR).sqrt()) @ vectors.T).float()
