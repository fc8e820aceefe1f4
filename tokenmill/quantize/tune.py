"""A last pass over the whole model: scales and norms learned against the unquantized model's logits, codes as they are.

Every method before it looks at one block; this one looks at what the model answers. The gradient of the KL divergence
runs back through the blocks one at a time; where the activations of all of them would take too much memory, each is
computed again from the states kept at its entrance. Steps compare the models on the tokens that the text makes likely:
a sixth of a vocabulary, or less, and what it leaves out is a thousandth of the probability. Scales are learned as
factors, which makes one rate fit all. What a held-out batch does not confirm is discarded. Everything is on one device.
Knows nothing of files; used by tune_job.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tokenmill.quantize.divergence import final_norm, head_logits, run_block
from tokenmill.quantize.source import SourceModel

_ROWS = 256  # of logits at a time
_LIKELY, _ASKED = 1e-3, 4096  # probability that makes a token likely, anywhere after so many tokens of the text
_MOMENTS = (0.9, 0.99)
KEPT_BYTES = 1 << 30  # of activations, of all blocks together; more: of one block at a time, each computed twice


class Tunable(Protocol):
    """A matrix that is linear in its scales: sum of bases, each times the factors of its groups."""

    factors: list[Tensor]  # what is learned; all one at the beginning

    def weight(self) -> Tensor:
        """float32 [out, in], differentiable in `factors`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Student:
    """One block of the quantized model. `floats`: every other tensor of it as it computes, norms among them."""

    matrices: Mapping[str, Tunable]
    floats: Mapping[str, Tensor]
    norms: Mapping[str, Tensor] = field(default_factory=dict)  # factors of norm vectors, by name

    def weights(self) -> dict[str, Tensor]:
        scaled = {name: self.floats[name] * factors for name, factors in self.norms.items()}
        return {**self.floats, **scaled, **{name: matrix.weight() for name, matrix in self.matrices.items()}}

    def parameters(self) -> list[Tensor]:
        return [*(each for matrix in self.matrices.values() for each in matrix.factors), *self.norms.values()]


@dataclass(frozen=True, slots=True)
class TuneOptions:
    steps: int
    rate: float = 1e-3  # of a factor, at its highest
    sequences: int = 4  # in a step


@dataclass(frozen=True, slots=True)
class TuneReport:
    before: float  # divergence on the held-out batch, nats per token
    after: float
    kept: bool


class Adam:
    """torch's optimizers want leaves that live as long as they do; these live for one block of one step."""

    def __init__(self, rate: float) -> None:
        self._rate, self._moments = rate, dict[int, tuple[Tensor, Tensor]]()

    def step(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], share: float, count: int) -> None:
        first, second = _MOMENTS
        for each, gradient in zip(parameters, gradients, strict=True):
            mean, square = self._moments.setdefault(id(each), (torch.zeros_like(each), torch.zeros_like(each)))
            mean.lerp_(gradient, 1 - first)
            square.lerp_(gradient.square(), 1 - second)
            root = (square / (1 - second**count)).sqrt_().add_(1e-12)
            each.detach().sub_(mean / (1 - first**count) / root, alpha=self._rate * share)


def graph_bytes(source: SourceModel, tokens: int) -> int:
    """What autograd keeps of all blocks while a step computes."""
    d = source.description
    row = 8 * d.hidden_size + 4 * (d.num_heads + d.num_kv_heads) * d.head_dim + 6 * d.intermediate_size
    weights = sum(out * width for out, width in map(source.shape, source.layer_linears()))
    return 4 * (tokens * row * source.num_blocks + 3 * weights)


class EndToEnd:
    """`embedding`, `head`: tables of the quantized model. `norm`: its final norm as it multiplies. All three, like the
    students, are on the device that computes."""

    def __init__(
        self,
        source: SourceModel,
        students: Sequence[Student],
        sequences: Tensor,
        embedding: Tensor,
        head: Tensor,
        norm: Tensor,
    ) -> None:
        self._source, self._students, self._sequences = source, students, sequences
        self._length = sequences.shape[1]
        self._embedding, self._head, self._norm = embedding, head, norm
        self.norm_factors = torch.ones_like(norm)
        self._device = norm.device
        self._teacher_head = source.read_edge("lm_head").to(self._device)
        self._teacher = self._teacher_states()
        self._likely = self.likely_tokens()
        self._likely_heads = (head[self._likely], self._teacher_head[self._likely])

    def run(self, options: TuneOptions) -> TuneReport:
        """Learn the factors of the students and `norm_factors`, all reset to one if a held-out batch got worse."""
        count = self._sequences.shape[0]
        held_out = list(range(0, count, max(2, count // options.sequences)))[: options.sequences]
        rest = [index for index in range(count) if index not in held_out] or held_out
        before = self.divergence(held_out)
        optimizer = Adam(options.rate)
        generator = torch.Generator().manual_seed(0)
        order: list[int] = []
        for step in range(options.steps):
            while len(order) < min(options.sequences, len(rest)):
                order += [rest[index] for index in torch.randperm(len(rest), generator=generator).tolist()]
            chosen, order = order[: options.sequences], order[options.sequences :]
            warm = min(1.0, (step + 1) / max(1, options.steps // 10))
            share = warm * 0.5 * (1 + math.cos(math.pi * step / options.steps))
            self._step(chosen, optimizer, share, step)
        after = self.divergence(held_out)
        if not after < before:
            for each in self._all_parameters():
                each.detach().fill_(1.0)
        return TuneReport(before, after, after < before)

    @torch.no_grad()
    def divergence(self, chosen: Sequence[int]) -> float:
        """Nats per token of some sequences, over the whole vocabulary."""
        states = self._embedded(chosen)
        for index in range(len(self._students)):
            _, states = self._run(index, states, learns=False)
        total, teacher = 0.0, self._teacher[list(chosen)].flatten(0, 1)
        for rows in torch.arange(states.shape[0]).split(_ROWS):
            reference = self._teacher_logits(teacher[rows]).log_softmax(-1)
            normed = final_norm(self._source, states[rows], self._norm * self.norm_factors)
            found = head_logits(self._source, normed, self._head).log_softmax(-1)
            total += float((reference.exp() * (reference - found)).sum())
        return total / states.shape[0]

    def _all_parameters(self) -> list[Tensor]:
        return [*(each for student in self._students for each in student.parameters()), self.norm_factors]

    @torch.no_grad()
    def _teacher_states(self) -> Tensor:
        """States of the float model before its final norm, [sequences, length, hidden]; a few sequences at a time."""
        states = self._source.embed(self._sequences).to(self._device)
        for index in range(self._source.num_blocks):
            weights = {name: tensor.to(self._device) for name, tensor in self._source.read_block(index).items()}
            for part in states.split(16):
                rows = part.flatten(0, 1)
                part.copy_(run_block(self._source, index, rows, weights, self._length).view_as(part))
        return states

    @torch.no_grad()
    def likely_tokens(self) -> Tensor:
        """Ids that the float model finds likely somewhere in the text."""
        peak = torch.zeros(self._teacher_head.shape[0], device=self._device)
        states = self._teacher.flatten(0, 1)
        for rows in states[:: -(-states.shape[0] // _ASKED)].split(_ROWS):
            peak = torch.maximum(peak, self._teacher_logits(rows).softmax(-1).amax(0))
        return (peak > _LIKELY).nonzero().flatten()

    def _teacher_logits(self, rows: Tensor, ids: Tensor | None = None) -> Tensor:
        table = self._teacher_head if ids is None else self._likely_heads[1]
        return head_logits(self._source, final_norm(self._source, rows), table, ids)

    def _embedded(self, chosen: Sequence[int]) -> Tensor:
        return self._source.embed(self._sequences[list(chosen)], self._embedding).flatten(0, 1)

    def _step(self, chosen: Sequence[int], optimizer: Adam, share: float, step: int) -> None:
        keeps = graph_bytes(self._source, len(chosen) * self._length) <= KEPT_BYTES
        runs: list[tuple[Tensor, Tensor]] = []  # of each block: what entered and left it
        states = self._embedded(chosen)
        for index in range(len(self._students)):
            runs.append(self._run(index, states, learns=keeps))
            states = runs[-1][1].detach()
        slopes, norm_slopes = self.slopes(states, chosen)
        optimizer.step([self.norm_factors], [norm_slopes], share, step + 1)
        for index in range(len(self._students) - 1, -1, -1):
            rows, output = runs.pop()
            if not keeps:
                rows, output = self._run(index, rows, learns=True)
            parameters = self._students[index].parameters()
            slopes, *found = torch.autograd.grad(output, [rows, *parameters], slopes)
            optimizer.step(parameters, found, share, step + 1)

    def _run(self, index: int, states: Tensor, learns: bool) -> tuple[Tensor, Tensor]:
        """(what enters a block, what leaves it), the second with gradients by the first and by all that is learned."""
        student = self._students[index]
        rows = states.detach().requires_grad_(learns)
        for each in student.parameters():
            each.requires_grad_(learns)
        with torch.set_grad_enabled(learns):
            return rows, run_block(self._source, index, rows, student.weights(), self._length)

    def slopes(self, states: Tensor, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Gradients of the divergence among likely tokens, by the states and by the final norm's factors."""
        slopes, norm_slopes = torch.empty_like(states), torch.zeros_like(self.norm_factors)
        teacher = self._teacher[list(chosen)].flatten(0, 1)
        for rows in torch.arange(states.shape[0]).split(_ROWS):
            leaf, factors = states[rows].requires_grad_(), self.norm_factors.clone().requires_grad_()
            with torch.enable_grad():
                normed = final_norm(self._source, leaf, self._norm * factors)
                logits = head_logits(self._source, normed, self._likely_heads[0], self._likely)
            with torch.no_grad():  # of a divergence by logits: the difference of the probabilities
                expected = self._teacher_logits(teacher[rows], self._likely).softmax(-1)
                by_logits = logits.softmax(-1).sub_(expected).div_(states.shape[0])
            slopes[rows], found = torch.autograd.grad(logits, [leaf, factors], by_logits)
            norm_slopes += found
        return slopes, norm_slopes
