"""Log-probabilities of given tokens: of every scored token of a window, or of continuations of a context.

Sits on engine/scoring.py: nothing is sampled, and continuations of one context compute it once. Knows nothing about
texts, tasks or metrics. Called by perplexity, the tasks and the lm_eval adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tokenmill.engine.build import EngineParts
from tokenmill.engine.scoring import Passage, read_logits
from tokenmill.evaluate.windows import Window

Progress = Callable[[int, int], None]  # done, total


def no_progress(_done: int, _total: int) -> None:
    """The default: progress is not reported."""


def window_logprobs(
    parts: EngineParts, windows: Sequence[Window], on_progress: Progress = no_progress
) -> list[np.ndarray]:
    """For each window, the log-probabilities of its scored tokens, float64.

    One window at a time: with integer kernels the batch shows in the last digits, and figures must repeat.
    """
    logprobs = []
    for number, window in enumerate(windows):
        values = np.full(window.num_scored, np.nan)

        def visit(
            _passage: int, position: int, logits: Tensor, window: Window = window, values: np.ndarray = values
        ) -> None:
            targets = torch.tensor(window.token_ids[position + 1 : position + 1 + len(logits)])
            begin = position + 1 - window.first
            values[begin : begin + len(logits)] = target_logprobs(logits, targets).numpy()

        read_logits(parts, [window.passage], visit)
        logprobs.append(values)
        on_progress(number + 1, len(windows))
    return logprobs


def target_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """[R] float64: log-softmax of each row at its target."""
    chosen = logits.gather(-1, targets[:, None])[:, 0]
    return chosen.double() - logits.logsumexp(-1).double()


@dataclass(frozen=True, slots=True)
class Continuation:
    """How likely some tokens are after a context. `greedy`: each of them is the most likely one."""

    logprob: float
    greedy: bool
    num_tokens: int


@dataclass(slots=True)
class _Reading:
    """One passage and the continuations that read its rows: those that differ in the last token only share it."""

    passage: Passage
    readers: list[tuple[int, Sequence[int]]] = field(default_factory=list)  # (index of the pair, its tokens)


def continuation_logprobs(
    parts: EngineParts,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],  # (context, continuation), both not empty
    on_progress: Progress = no_progress,
) -> list[Continuation]:
    """One result per pair. Pairs of one context should be adjacent: they share its computation."""
    logprobs = [np.zeros(len(tokens)) for _, tokens in pairs]
    greedy = [np.zeros(len(tokens), dtype=bool) for _, tokens in pairs]
    done = 0
    for wave in _waves(_readings(pairs)):

        def visit(number: int, position: int, logits: Tensor, wave: list[_Reading] = wave) -> None:
            reading = wave[number]
            begin = position - reading.passage.first
            best = logits.argmax(-1)
            for pair, tokens in reading.readers:
                targets = torch.tensor(tokens[begin : begin + len(logits)])
                logprobs[pair][begin : begin + len(logits)] = target_logprobs(logits, targets).numpy()
                greedy[pair][begin : begin + len(logits)] = (best == targets).numpy()

        read_logits(parts, [reading.passage for reading in wave], visit)
        done += sum(len(reading.readers) for reading in wave)
        on_progress(done, len(pairs))
    return [
        Continuation(float(values.sum()), bool(sure.all()), len(values))
        for values, sure in zip(logprobs, greedy, strict=True)
    ]


def _readings(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterable[_Reading]:
    readings: dict[tuple[int, ...], _Reading] = {}
    for number, (context, continuation) in enumerate(pairs):
        assert context, "a continuation of nothing"
        assert continuation, "an empty continuation"
        key = (len(context), *context, *continuation[:-1])
        if key not in readings:
            readings[key] = _Reading(Passage(key[1:], len(context) - 1))
        readings[key].readers.append((number, continuation))
    return readings.values()


def _waves(readings: Iterable[_Reading], contexts_at_once: int = 32) -> Iterable[list[_Reading]]:
    """Groups of contexts in two waves each: one reading per context, then the others, which find it in the cache."""
    firsts: list[_Reading] = []
    repeats: list[_Reading] = []
    last: tuple[int, ...] | None = None
    for reading in readings:
        context = tuple(reading.passage.token_ids[: reading.passage.first + 1])
        if context == last:
            repeats.append(reading)
            continue
        if len(firsts) == contexts_at_once:
            yield from filter(None, (firsts, repeats))
            firsts, repeats = [], []
        firsts.append(reading)
        last = context
    yield from filter(None, (firsts, repeats))
