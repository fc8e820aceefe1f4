"""A last pass over the whole model: scales and norms learned against the unquantized model's logits, codes as they are.

Every method before it looks at one block; this one looks at what the model answers. The gradient of the KL divergence
runs back through the blocks one at a time, each computed again from the states kept at its entrance, so only one
block's activations are in memory. Scales are learned as factors, which makes one rate fit all. What a held-out batch
does not confirm is discarded. Knows nothing of files; used by tune_job.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tokenmill.kernels import ref
from tokenmill.quantize.divergence import head_logits, run_block
from tokenmill.quantize.source import SourceModel

_ROWS = 256  # of logits at a time
_MOMENTS = (0.9, 0.99)
FORWARD_PASSES = 5.0  # what a step costs, in forward passes of its tokens: down, down again, and back for two


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
    stride: int = 4  # one token in so many is scored: the head costs as much as many blocks


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


class EndToEnd:
    """`embedding`, `head`: tables of the quantized model. `norm`: its final norm as it multiplies."""

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
        self._teacher_head = source.read_edge("lm_head")
        self._teacher = self._teacher_states()

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
            self._step(chosen, optimizer, share, step, options.stride)
        after = self.divergence(held_out)
        if not after < before:
            for each in self._all_parameters():
                each.detach().fill_(1.0)
        return TuneReport(before, after, after < before)

    @torch.no_grad()
    def divergence(self, chosen: Sequence[int]) -> float:
        states = self._forward(chosen)[-1]
        return self._loss(states, chosen, torch.arange(states.shape[0]), learns=False)[0]

    def _all_parameters(self) -> list[Tensor]:
        return [*(each for student in self._students for each in student.parameters()), self.norm_factors]

    @torch.no_grad()
    def _teacher_states(self) -> Tensor:
        """States of the float model before its final norm, [sequences, length, hidden]; a few sequences at a time."""
        states = self._source.embed(self._sequences)
        for index in range(self._source.num_blocks):
            weights = self._source.read_block(index)
            for part in states.split(16):
                rows = part.flatten(0, 1)
                part.copy_(run_block(self._source, index, rows, weights, self._length).view_as(part))
        return states

    @torch.no_grad()
    def _forward(self, chosen: Sequence[int]) -> list[Tensor]:
        """What enters each block, and the final norm."""
        states = self._source.embed(self._sequences[list(chosen)], self._embedding).flatten(0, 1)
        entering = [states]
        for index, student in enumerate(self._students):
            entering.append(run_block(self._source, index, entering[-1], student.weights(), self._length))
        return entering

    def _step(self, chosen: Sequence[int], optimizer: Adam, share: float, step: int, stride: int) -> None:
        entering = self._forward(chosen)
        scored = torch.arange(step % stride, entering[-1].shape[0], stride)
        _, slopes, norm_slopes = self._loss(entering[-1], chosen, scored, learns=True)
        assert norm_slopes is not None
        optimizer.step([self.norm_factors], [norm_slopes], share, step + 1)
        for index in range(len(self._students) - 1, -1, -1):
            student = self._students[index]
            parameters = student.parameters()
            rows = entering[index].detach().requires_grad_()
            with torch.enable_grad():
                for each in parameters:
                    each.requires_grad_()
                output = run_block(self._source, index, rows, student.weights(), self._length)
                slopes, *found = torch.autograd.grad(output, [rows, *parameters], slopes)
            for each in parameters:
                each.requires_grad_(False)
            optimizer.step(parameters, found, share, step + 1)
            entering.pop()

    def _loss(
        self, states: Tensor, chosen: Sequence[int], scored: Tensor, learns: bool
    ) -> tuple[float, Tensor, Tensor | None]:
        """(nats per token, gradient by the states, gradient by the final norm's factors) of the `scored` rows; without
        `learns` only the first."""
        total, slopes = 0.0, torch.zeros_like(states)
        teacher = self._teacher[list(chosen)].flatten(0, 1)
        factors = self.norm_factors.clone().requires_grad_(learns)
        with torch.set_grad_enabled(learns):
            for rows in scored.split(_ROWS):
                with torch.no_grad():
                    normed = self._source.decoder.norm.of_tensor(teacher[rows])
                    reference = head_logits(self._source, normed, self._teacher_head).log_softmax(-1)
                leaf = states[rows].detach().requires_grad_(learns)
                normed = self._final_norm(leaf, self._norm * factors)
                found = head_logits(self._source, normed, self._head).log_softmax(-1)
                loss = (reference.exp() * (reference - found)).sum() / len(scored)
                total += float(loss.detach())
                if learns:
                    loss.backward()
                    assert leaf.grad is not None
                    slopes[rows] = leaf.grad
        return total, slopes, factors.grad

    def _final_norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        norm = self._source.decoder.norm
        if norm.removes_mean:
            return ref.layer_norm(rows, weight, norm.bias, norm.eps)
        return ref.rms_norm(rows, weight, norm.eps)
