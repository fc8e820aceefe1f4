"""Calibration: hidden states of all sequences, moved forward block by block, and the statistics that methods need.

`CalibratedBlock` is the BlockView that methods work on: one block's float32 weights and the calibration data at its
input. Statistics are streamed: a batch of sequences runs up to the requested input and is added to the sums.
Weights and arithmetic are on the block's device, hidden states on the host. Used by the job; knows no recipes or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import overload

import torch
from torch import Tensor

from tokenmill.quantize.base import SAMPLE_ROWS, Drift, LinearGroup, Statistics
from tokenmill.quantize.calibration_ops import CalibrationOps, ReachedInput
from tokenmill.quantize.source import SourceModel
from tokenmill.quantize.tape import Tape, TapedOps

KINDS = ("hessian", "mean_square", "mean_abs", "max_abs", "sample")
_HESSIAN_TILE = 1024
_HOST = torch.device("cpu")


class HiddenStates:
    """Inputs of the present block, [sequences, length, hidden], float32 or (to save memory) float16, on the host."""

    def __init__(self, values: Tensor, batch: int) -> None:
        self.values = values
        self.batch = batch  # sequences computed at a time

    @property
    def num_tokens(self) -> int:
        return self.values.shape[0] * self.values.shape[1]

    def batches(self, device: torch.device = _HOST) -> Iterator[tuple[slice, Tensor]]:
        """(which sequences, their states as float32 [tokens, hidden] on `device`)."""
        for begin in range(0, self.values.shape[0], self.batch):
            cut = slice(begin, begin + self.batch)
            yield cut, self.values[cut].to(device).float().flatten(0, 1)

    def advance(self, run: Callable[[Tensor], Tensor], device: torch.device = _HOST) -> None:
        """Replace the states by the block's outputs, in place."""
        for cut, states in self.batches(device):
            self.values[cut] = run(states).view(self.values[cut].shape).to(self.values.device)


class SequenceInputs(Sequence[Tensor]):
    """The block's inputs one sequence at a time, converted to float32 and moved to the device on access."""

    def __init__(self, values: Tensor, device: torch.device) -> None:
        self._values = values
        self._device = device

    def __len__(self) -> int:
        return self._values.shape[0]

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> SequenceInputs: ...
    def __getitem__(self, index: int | slice) -> Tensor | SequenceInputs:
        if isinstance(index, slice):
            return SequenceInputs(self._values[index], self._device)
        return self._values[index].to(self._device).float()


class CalibratedBlock:
    """A BlockView. Without hidden states (data-free methods) only weights can be read and replaced."""

    def __init__(
        self,
        source: SourceModel,
        index: int,
        states: HiddenStates | None,
        device: torch.device = _HOST,
        float_states: HiddenStates | None = None,
        tapes: bool = False,
    ) -> None:
        """`float_states`: the inputs of this block in the model of which nothing is rounded. `tapes`: there is memory
        to keep what is needed to go on from the input that was asked for last."""
        self.index = index
        self._tapes: dict[tuple[bool, int], Tape] | None = {} if tapes else None  # by (of the float model, batch)
        self._asked: LinearGroup | None = None  # whose input tapes were stopped at
        self._float_states = float_states
        self._float_tensors: dict[
            str, Tensor
        ] = {}  # of the block before anything was rounded, until its states moved on
        self.device = device
        self.groups: Sequence[LinearGroup] = source.groups(index)
        self.kept = frozenset(source.kept_names(index))  # matrices that are never quantized
        self.of_states = frozenset(source.state_names(index))  # no matrices, stored as they are
        self.head_dim = source.description.head_dim
        self.tensors = {name: tensor.to(device) for name, tensor in source.read_block(index).items()}
        self._block = source.block(index)
        self._names = source.names
        self._state_shapes = source.state_shapes(index)
        self._states = states
        self.errors: dict[str, float] = {}  # by linear, since watch_errors
        self._watches_errors = False
        self.residuals: dict[str, Tensor] | None = None  # what rounding took from each linear, where a dict is put here

    def watch_errors(self) -> None:
        """From now on a replaced linear is a quantized one: record its relative error."""
        self._watches_errors = True

    def weight(self, name: str) -> Tensor:
        return self.tensors[name]

    def replace(self, name: str, value: Tensor) -> None:
        assert value.shape == self.tensors[name].shape, (name, value.shape, self.tensors[name].shape)
        value = value.detach().float()
        if self._watches_errors and value.dim() == 2:
            before = self.tensors[name]
            self.errors[name] = float((value - before).norm() / before.norm().clamp(min=1e-30))
            if self.residuals is not None:
                self.residuals[name] = before - value
        self.tensors[name] = value
        if self._asked is not None and name.removesuffix(".bias") not in self._asked.names:
            self._rewind()  # what tapes hold was made by other weights

    def bias(self, name: str) -> Tensor | None:
        return self.tensors.get(f"{name}.bias")

    def replace_bias(self, name: str, value: Tensor) -> None:
        self.replace(f"{name}.bias", value)

    def inputs(self) -> SequenceInputs:
        assert self._states is not None, "this job has no calibration data"
        return SequenceInputs(self._states.values, self.device)

    def targets(self) -> SequenceInputs | None:
        self.advance_float()
        return None if self._float_states is None else SequenceInputs(self._float_states.values, self.device)

    def begin_rounding(self) -> None:
        """Transforms are done: with these weights the float model's states go on, where they are carried along."""
        if self._float_states is not None:
            self._float_tensors = dict(self.tensors)

    @torch.no_grad()
    def advance_float(self) -> None:
        """Move the float model's states past this block, unless they have been."""
        if self._float_states is not None and self._float_tensors:
            weights, self._float_tensors = self._float_tensors, {}
            self._advance(self._float_states, weights, of_float=True)

    @torch.no_grad()
    def statistics_beside_float(self, group: LinearGroup) -> tuple[Statistics, Drift | None]:
        if self._float_states is None:
            return self.statistics(group, ("hessian",)), None
        assert self._states is not None
        assert self._float_tensors, "the float model's states have moved on"
        self._turn_to(group)
        first, count, length = group.names[0], *self._states.values.shape[:2]
        # Of the sequences with even numbers, and of the others.
        squares, crosses = torch.zeros(2, 2, *2 * [self.tensors[first].shape[1]], device=self.device)
        both = zip(self._states.batches(self.device), self._float_states.batches(self.device), strict=True)
        drifts, seen = count > 1, 0
        for (cut, states), (_, float_states) in both:
            rows = self._reaching(first, states, self.tensors, (False, cut.start))
            seen += len(rows)
            if not drifts or len(rows) < len(states):
                drifts = False
                add_gram(squares[0], rows)
                continue
            other = self._reaching(first, float_states, self._float_tensors, (True, cut.start))
            drifts = len(other) == len(states)  # not those of an expert: each model sends it other tokens
            if not drifts:
                add_gram(squares[0], rows)
                continue
            for number in range(2):
                start = (cut.start + number) % 2
                mine, others = (
                    each.unflatten(0, (-1, length))[start::2].flatten(0, 1).contiguous() for each in (rows, other)
                )
                add_gram(squares[number], mine)
                crosses[number].addmm_(others.T, mine)
        mirror_upper_(squares[0])
        mirror_upper_(squares[1])
        hessian = (squares[0] + squares[1]).div_(max(1, seen))
        statistics = Statistics(seen, hessian, None, None, None, None)
        if not drifts:
            return statistics, None
        half, tokens = (count + 1) // 2 * length, count * length
        cross = crosses[1].add_(crosses[0]).div_(tokens)
        return statistics, Drift(hessian, cross, squares[0].div_(half), crosses[0].div_(half), half / tokens)

    @property
    def tapes_work(self) -> bool:
        return self._tapes is not None

    def _turn_to(self, group: LinearGroup) -> None:
        """The input of this group is asked for. Tapes only run forwards."""
        turns = [each.names for each in self.groups]
        if self._asked is not None and turns.index(group.names) < turns.index(self._asked.names):
            self._rewind()
        self._asked = group

    def _rewind(self) -> None:
        self._asked = None
        if self._tapes:
            self._tapes.clear()

    def _reaching(self, name: str, states: Tensor, weights: Mapping[str, Tensor], batch: tuple[bool, int]) -> Tensor:
        """float32 [tokens, in]: what a linear reads; fewer tokens where it is an expert's. `batch`: see _tapes."""
        rows: list[Tensor] = []
        self._resume(batch, states, weights, {name: rows.append}, name, lambda: rows)
        width = self.tensors[name].shape[1]
        return torch.cat([each.reshape(-1, width).float() for each in rows]) if rows else states.new_empty(0, width)

    def _resume(
        self,
        batch: tuple[bool, int],
        states: Tensor,
        weights: Mapping[str, Tensor],
        watched: Mapping[str, Callable[[Tensor], None]],
        stop_at: str | None,
        found: Callable[[], list[Tensor]],
    ) -> Tensor:
        """Run the block for `found`, from where its tape was stopped; from its entrance if that misses something."""
        if self._tapes is None:
            return self._run(states, weights, watched, stop_at=stop_at)
        output = self._run(states, weights, watched, stop_at=stop_at, tape=self._tapes.setdefault(batch, Tape()))
        if stop_at and not found():  # an expert that no token reached, or an input that the tape had passed
            return self._run(states, weights, watched, stop_at=stop_at)
        if any(bool(each[:1].isnan().any()) for each in (found() if stop_at else [output])):
            self._tapes = None
            found().clear()
            return self._run(states, weights, watched, stop_at=stop_at)
        return output

    @torch.no_grad()
    def statistics(self, group: LinearGroup, kinds: Sequence[str]) -> Statistics:
        assert self._states is not None, "this job has no calibration data"
        self._turn_to(group)
        first = group.names[0]
        collector = self._collector(first, kinds)
        for cut, states in self._states.batches(self.device):
            rows = self._reaching(first, states, self.tensors, (False, cut.start))
            if len(rows):
                collector.add(rows)
        return collector.finish()

    @torch.no_grad()
    def survey(self, kinds: Sequence[str]) -> dict[str, Statistics]:
        """Statistics of every group's input, by linear, and the hidden states moved on: all in one pass."""
        assert self._states is not None, "this job has no calibration data"
        collectors = {group.names[0]: self._collector(group.names[0], kinds) for group in self.groups}
        watched = {name: collector.add for name, collector in collectors.items()}
        self._states.advance(lambda states: self._run(states, self.tensors, watched), self.device)
        statistics = {name: collector.finish() for name, collector in collectors.items()}
        return {name: statistics[group.names[0]] for group in self.groups for name in group.names}

    def forward(self, inputs: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        return self._run(rows, {**self.tensors, **weights}, {}, length=inputs.shape[-2]).view(inputs.shape)

    @torch.no_grad()
    def advance(self, watch_attention: Callable[[Tensor, Tensor], None] | None = None) -> None:
        """Move the hidden states past this block, with its weights as they are now."""
        assert self._states is not None
        self._advance(self._states, self.tensors, of_float=False, watch_attention=watch_attention)

    def _advance(
        self,
        states: HiddenStates,
        weights: Mapping[str, Tensor],
        of_float: bool,
        watch_attention: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        for cut, rows in states.batches(self.device):
            if watch_attention is None:
                output = self._resume((of_float, cut.start), rows, weights, {}, None, list)
            else:
                output = self._run(rows, weights, {}, watch_attention=watch_attention)
            states.values[cut] = output.view(states.values[cut].shape).to(states.values.device)
            if self._tapes:
                self._tapes.pop((of_float, cut.start), None)

    def _collector(self, name: str, kinds: Sequence[str]) -> StatisticsCollector:
        """A collector of the input of linear `name`."""
        assert self._states is not None
        return StatisticsCollector(self.tensors[name].shape[1], self._states.num_tokens, kinds, self.device)

    def _run(
        self,
        states: Tensor,
        weights: Mapping[str, Tensor],
        watched: Mapping[str, Callable[[Tensor], None]],
        stop_at: str | None = None,
        length: int = 0,
        watch_attention: Callable[[Tensor, Tensor], None] | None = None,
        tape: Tape | None = None,
    ) -> Tensor:
        if not length:
            assert self._states is not None
            length = self._states.values.shape[1]
        ops = CalibrationOps(self._names, weights, length, watched, stop_at, self._state_shapes, watch_attention)
        try:
            residual, update = self._block(ops if tape is None else TapedOps(ops, tape), states, None)
        except ReachedInput:
            return states
        output: Tensor = residual + update
        return output


class StatisticsCollector:
    """Adds up batches of rows [tokens, in], all on `device`; one pass serves every requested kind."""

    def __init__(self, in_features: int, num_tokens: int, kinds: Sequence[str], device: torch.device = _HOST) -> None:
        assert set(kinds) <= set(KINDS), kinds
        self._kinds = frozenset(kinds)
        self._seen = 0
        self._hessian = torch.zeros(in_features, in_features, device=device) if "hessian" in kinds else None
        self._square = torch.zeros(in_features, dtype=torch.float64, device=device)
        self._abs = torch.zeros(in_features, dtype=torch.float64, device=device)
        self._max = torch.zeros(in_features, device=device)
        self._stride = max(1, num_tokens // SAMPLE_ROWS)
        self._sample: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        x = x.detach()
        if self._hessian is not None:
            add_gram(self._hessian, x)
        if "mean_square" in self._kinds:
            self._square += x.square().sum(0)
        if "mean_abs" in self._kinds:
            self._abs += x.abs().sum(0)
        if "max_abs" in self._kinds:
            self._max = torch.maximum(self._max, x.abs().amax(0))
        if "sample" in self._kinds:
            offset = -self._seen % self._stride
            self._sample.append(x[offset :: self._stride].clone())
        self._seen += x.shape[0]

    def finish(self) -> Statistics:
        count = max(1, self._seen)
        hessian = self._hessian
        if hessian is not None:
            mirror_upper_(hessian.div_(count))
        return Statistics(
            num_tokens=self._seen,
            hessian=hessian,
            mean_square=(self._square / count).float() if "mean_square" in self._kinds else None,
            mean_abs=(self._abs / count).float() if "mean_abs" in self._kinds else None,
            max_abs=self._max if "max_abs" in self._kinds else None,
            sample=torch.cat(self._sample)[:SAMPLE_ROWS] if "sample" in self._kinds else None,
        )


def add_gram(gram: Tensor, x: Tensor) -> None:
    """gram += x^T x in the upper tiles only: the rest is its mirror, so nearly half of the work is saved."""
    size = gram.shape[0]
    for begin in range(0, size, _HESSIAN_TILE):
        end = min(begin + _HESSIAN_TILE, size)
        gram[begin:end, begin:].addmm_(x[:, begin:end].T, x[:, begin:])


def mirror_upper_(gram: Tensor) -> None:
    """Make a matrix symmetric of which only the upper tiles are filled in."""
    size = gram.shape[0]
    for begin in range(0, size, _HESSIAN_TILE):
        end = min(begin + _HESSIAN_TILE, size)
        gram[end:, begin:end] = gram[begin:end, end:].T
