"""A last pass over the whole model: what is left to learn of it, against the unquantized model's logits.

Every method before it looks at one block; this one looks at what the model answers. The gradient of the KL divergence
runs back through the blocks one at a time; where the activations of all of them would take too much memory, each is
computed again from the states kept at its entrance. Steps compare the models on the tokens that the text makes likely:
a sixth of a vocabulary, or less, and what it leaves out is a thousandth of the probability. What a matrix learns is its
own business: scales as factors, which makes one rate fit all (tune_job.py), or codes too (train_codes.py). Of a head
that is no embedding a mixing of its input is learned, which its table then holds. What a held-out batch does not
confirm is discarded. Everything is on one device. Knows nothing of files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tokenmill.quantize.divergence import final_norm, head_logits, run_block
from tokenmill.quantize.source import SourceModel

_ROWS = 256  # of logits at a time
LOGIT_BYTES = 5 * 4 * _ROWS  # for each word of the vocabulary, while two models are compared
_LIKELY, _ASKED = 1e-3, 4096  # probability that makes a token likely, anywhere after so many tokens of the text
_MOMENTS = (0.9, 0.99)
_MIXING = 0.3  # share of the rate that the mixing of the head's input gets
_SAVES = 20  # times that what was learned is written, in all steps
KEPT_BYTES = 1 << 30  # of activations, of all blocks together; more: of one block at a time, each computed twice


class Tunable(Protocol):
    """A matrix of which something is learned."""

    @property
    def factors(self) -> Sequence[Tensor]: ...  # what is learned
    @property
    def shares(self) -> Sequence[float]: ...  # of the rate, that each of them gets

    def weight(self) -> Tensor:
        """float32 [out, in], differentiable in `factors`."""
        ...

    def reset(self) -> None:
        """As it was before the first step."""
        ...


class Progress(Protocol):
    """Keeps what was learned so far, for a pass that is killed."""

    def load(self) -> tuple[int, Iterable[Tensor]]:
        """(steps done, their tensors); none of both where nothing was saved."""
        ...

    def save(self, steps: int, tensors: Sequence[Tensor]) -> None: ...


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

    def shares(self, norms: float) -> list[float]:
        return [*(each for matrix in self.matrices.values() for each in matrix.shares), *[norms] * len(self.norms)]

    def reset(self) -> None:
        for matrix in self.matrices.values():
            matrix.reset()
        for factors in self.norms.values():
            factors.detach().fill_(1.0)


@dataclass(frozen=True, slots=True)
class TuneOptions:
    steps: int
    rate: float = 1e-3  # of a factor, at its highest
    sequences: int = 4  # in a step
    norms: float = 1.0  # share of the rate that norms get


@dataclass(frozen=True, slots=True)
class TuneReport:
    before: float  # divergence on the held-out batch, nats per token
    after: float
    kept: bool


class Adam:
    """torch's optimizers want leaves that live as long as they do; these live for one block of one step."""

    def __init__(self) -> None:
        self._moments = dict[int, tuple[Tensor, Tensor]]()

    def moments(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """Running means of its gradients and of their squares."""
        if id(parameter) not in self._moments:
            self._moments[id(parameter)] = (torch.zeros_like(parameter), torch.zeros_like(parameter))
        return self._moments[id(parameter)]

    def step(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], rates: Sequence[float], count: int
    ) -> None:
        """Without a gradient (an expert that no token of the step reached) a parameter stays."""
        first, second = _MOMENTS
        for each, gradient, rate in zip(parameters, gradients, rates, strict=True):
            if gradient is None:
                continue
            mean, square = self.moments(each)
            mean.lerp_(gradient, 1 - first)
            square.lerp_(gradient.square(), 1 - second)
            root = (square / (1 - second**count)).sqrt_().add_(1e-12)
            each.detach().addcdiv_(mean, root, value=-rate / (1 - first**count))


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
        head_alone: bool = False,
    ) -> None:
        """`head_alone`: the head is a table of its own, which may change."""
        self._source, self._students, self._sequences = source, students, sequences
        self._length = sequences.shape[1]
        self._embedding, self._head, self._norm = embedding, head, norm
        self.norm_factors = torch.ones_like(norm)
        self.mixing = norm.new_zeros(2 * (len(norm),) if head_alone else (0, 0))  # M: the head reads x + M x
        self._device = norm.device
        self._teacher_head = source.read_edge("lm_head").to(self._device)
        self._teacher = self._teacher_states()
        self._likely = self.likely_tokens()
        self._likely_heads = (head[self._likely], self._teacher_head[self._likely])

    def run(self, options: TuneOptions, progress: Progress | None = None) -> TuneReport:
        """Learn what the students and the final norm have to learn; all as before if a held-out batch got worse."""
        count = self._sequences.shape[0]
        held_out = list(range(0, count, max(2, count // options.sequences)))[: options.sequences]
        rest = [index for index in range(count) if index not in held_out]
        before = self.divergence(held_out)
        optimizer = Adam()
        done = 0 if progress is None else self._restore(progress, optimizer)
        for step, chosen in enumerate(_batches(rest, options)):
            if step < done:
                continue
            warm = min(1.0, (step + 1) / max(1, options.steps // 10))
            share = warm * 0.5 * (1 + math.cos(math.pi * step / options.steps))
            self._step(chosen, optimizer, options.rate * share, options.norms, step)
            if progress is not None and (step + 1) % -(-options.steps // _SAVES) == 0:
                parameters = self._all_parameters()
                progress.save(step + 1, [each for one in parameters for each in (one, *optimizer.moments(one))])
        after = self.divergence(held_out)
        if not after < before:
            self.norm_factors.detach().fill_(1.0)
            self.mixing.detach().zero_()
            for student in self._students:
                student.reset()
        return TuneReport(before, after, after < before)

    def _restore(self, progress: Progress, optimizer: Adam) -> int:
        done, kept = progress.load()
        present = [each for one in self._all_parameters() for each in (one, *optimizer.moments(one))] if done else []
        for each, value in zip(present, kept, strict=True):
            each.detach().copy_(value)
        return done

    @torch.no_grad()
    def divergence(self, chosen: Sequence[int]) -> float:
        """Nats per token of some sequences, over the whole vocabulary."""
        states = self._embedded(chosen)
        for index in range(len(self._students)):
            _, states = self._run(index, states, learns=False)
        total, teacher = 0.0, self._teacher[list(chosen)].flatten(0, 1)
        for rows in torch.arange(states.shape[0]).split(_ROWS):
            reference = self._teacher_logits(teacher[rows]).log_softmax(-1)
            normed = self._normed(states[rows], self.norm_factors, self.mixing)
            found = head_logits(self._source, normed, self._head).log_softmax(-1)
            total += float((reference.exp() * (reference - found)).sum())
        return total / states.shape[0]

    def _normed(self, states: Tensor, factors: Tensor, mixing: Tensor) -> Tensor:
        """What the head reads."""
        rows = final_norm(self._source, states, self._norm * factors)
        return torch.addmm(rows, rows, mixing.T) if mixing.numel() else rows

    def mixed_head(self) -> Tensor:
        """A table that does what the head does after mixing."""
        return torch.addmm(self._head, self._head, self.mixing.detach()) if self.mixing.numel() else self._head

    def _all_parameters(self) -> list[Tensor]:
        blocks = [each for student in self._students for each in student.parameters()]
        return [*blocks, self.norm_factors, *([self.mixing] if self.mixing.numel() else [])]

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
        """Ids that the float model finds likely somewhere in the text; all where it is sure of none."""
        peak = torch.zeros(self._teacher_head.shape[0], device=self._device)
        states = self._teacher.flatten(0, 1)
        for rows in states[:: -(-states.shape[0] // _ASKED)].split(_ROWS):
            peak = torch.maximum(peak, self._teacher_logits(rows).softmax(-1).amax(0))
        found = (peak > _LIKELY).nonzero().flatten()
        return found if len(found) > 1 else torch.arange(len(peak), device=self._device)

    def _teacher_logits(self, rows: Tensor, ids: Tensor | None = None) -> Tensor:
        table = self._teacher_head if ids is None else self._likely_heads[1]
        return head_logits(self._source, final_norm(self._source, rows), table, ids)

    def _embedded(self, chosen: Sequence[int]) -> Tensor:
        return self._source.embed(self._sequences[list(chosen)], self._embedding).flatten(0, 1)

    def _step(self, chosen: Sequence[int], optimizer: Adam, rate: float, norms: float, step: int) -> None:
        keeps = graph_bytes(self._source, len(chosen) * self._length) <= KEPT_BYTES
        runs: list[tuple[Tensor, Tensor]] = []  # of each block: what entered and left it
        states = self._embedded(chosen)
        for index in range(len(self._students)):
            runs.append(self._run(index, states, learns=keeps))
            states = runs[-1][1].detach()
        slopes, *found = self.slopes(states, chosen)
        rates = [rate * norms, rate * _MIXING]
        optimizer.step([self.norm_factors, self.mixing], found, rates, step + 1)
        for index in range(len(self._students) - 1, -1, -1):
            rows, output = runs.pop()
            if not keeps:
                rows, output = self._run(index, rows, learns=True)
            parameters = self._students[index].parameters()
            slopes, *found = torch.autograd.grad(output, [rows, *parameters], slopes, allow_unused=True)
            rates = [rate * share for share in self._students[index].shares(norms)]
            optimizer.step(parameters, found, rates, step + 1)

    def _run(self, index: int, states: Tensor, learns: bool) -> tuple[Tensor, Tensor]:
        """(what enters a block, what leaves it), the second with gradients by the first and by all that is learned."""
        student = self._students[index]
        rows = states.detach().requires_grad_(learns)
        for each in student.parameters():
            each.requires_grad_(learns)
        with torch.set_grad_enabled(learns):
            return rows, run_block(self._source, index, rows, student.weights(), self._length)

    def slopes(self, states: Tensor, chosen: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the divergence among likely tokens, by the states, the final norm's factors and the mixing."""
        slopes, norm_slopes = torch.empty_like(states), torch.zeros_like(self.norm_factors)
        mixing_slopes = torch.zeros_like(self.mixing)
        teacher = self._teacher[list(chosen)].flatten(0, 1)
        for rows in torch.arange(states.shape[0]).split(_ROWS):
            leaf, factors = states[rows].requires_grad_(), self.norm_factors.clone().requires_grad_()
            mixing = self.mixing.clone().requires_grad_()
            with torch.enable_grad():
                normed = self._normed(leaf, factors, mixing)
                logits = head_logits(self._source, normed, self._likely_heads[0], self._likely)
            with torch.no_grad():  # of a divergence by logits: the difference of the probabilities
                expected = self._teacher_logits(teacher[rows], self._likely).softmax(-1)
                by_logits = logits.softmax(-1).sub_(expected).div_(states.shape[0])
            learned = [leaf, factors, mixing]
            slopes[rows], found, mixed = torch.autograd.grad(logits, learned, by_logits, materialize_grads=True)
            norm_slopes += found
            mixing_slopes += mixed
        return slopes, norm_slopes, mixing_slopes


def _batches(pool: Sequence[int], options: TuneOptions) -> Iterator[list[int]]:
    """Of each step; every sequence comes once before one comes again."""
    generator = torch.Generator().manual_seed(0)
    order: list[int] = []
    size = min(options.sequences, len(pool))
    for _ in range(options.steps):
        while len(order) < size:
            order += [pool[index] for index in torch.randperm(len(pool), generator=generator).tolist()]
        chosen, order = order[:size], order[size:]
        yield chosen
