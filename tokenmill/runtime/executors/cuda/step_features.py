"""Features of requests that a captured step has itself: penalties before the draw, log-probabilities behind it.

Nothing of them waits for the host: a step counts the token it was given, once (also if it is dropped and run again), so
the next one can be queued before the host knows which token that is. Log-probabilities are asked for behind the step,
and arrive with its tokens. Owned by the graph executor; other features are the sampler's (sampling.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tokenmill.kernels import triton as gpu
from tokenmill.runtime.executors.cuda.logit_edits import TokenCounts, send
from tokenmill.types import Request, TokenLogprobs


class Report:
    """Log-probabilities on their way to the host: to be read once the device has done what was launched before."""

    def __init__(self, logits: Tensor, rows: Tensor, chosen: Tensor, tops: Sequence[int]) -> None:
        vocab = logits.shape[1]
        self._tops = [min(top, vocab) for top in tops]
        most = max(self._tops)
        packed = gpu.token_reports(logits, rows, chosen, 0 if most == 0 else 1 << (most - 1).bit_length())
        self._host = packed
        if packed.device.type == "cuda":
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)

    def records(self) -> list[TokenLogprobs]:
        integers = self._host.numpy()
        floats = integers.view(np.float32)
        tokens, larger = integers[:, 0].tolist(), integers[:, 2].tolist()
        own, ids, values = floats[:, 1].tolist(), integers[:, 3::2].tolist(), floats[:, 4::2].tolist()
        best = [tuple(zip(i[:top], v[:top], strict=True)) for i, v, top in zip(ids, values, self._tops, strict=True)]
        return [TokenLogprobs(*row) for row in zip(tokens, own, [each + 1 for each in larger], best, strict=True)]


class RowReports:
    """The log-probabilities of some rows of a step."""

    def __init__(self, rows: list[int], report: Report) -> None:
        self._rows, self._report = rows, report

    def records(self, row_numbers: Sequence[int]) -> list[TokenLogprobs | None]:
        """By row of a plan: the record of its row in the step."""
        found = dict(zip(self._rows, self._report.records(), strict=True))
        return [found.get(number) for number in row_numbers]


class StepFeatures:
    def __init__(
        self, device: torch.device, max_rows: int, vocab: int, counts_of: Callable[[int], TokenCounts]
    ) -> None:
        self._device, self._vocab, self._counts_of = device, vocab, counts_of
        self._places = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        self._factors = torch.zeros(max_rows, 3, dtype=torch.float32, device=device)
        self._sent: list[int] = []  # the places on the device
        self._requests: list[Request] = []
        self._penalized: list[int] = []  # rows of the step that begins
        self._reported: list[int] = []
        self._reported_there = self._places[:0]
        self._captured_with: Tensor | None = None  # the table that captured steps read

    @property
    def penalized(self) -> bool:
        """Whether a row of the step that was begun last has penalties."""
        return bool(self._penalized)

    def begin(self, requests: Sequence[Request], positions: Sequence[int]) -> None:
        """Before a step: its rows, and the positions of their tokens. No requests: a step whose tokens somebody else
        chooses, or that has padding rows only."""
        if self._requests != requests:
            self._requests = list(requests)
            self._penalized = [row for row, request in enumerate(requests) if request.params.penalizes]
            self._reported = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
            self._reported_there = send(np.array(self._reported, dtype=np.int32), self._device)
            if self._penalized:
                params = [request.params for request in requests]
                factors = [(each.repetition_penalty, each.frequency_penalty, each.presence_penalty) for each in params]
                self._factors[: len(requests)] = send(np.array(factors, dtype=np.float32), self._device)
        if self._penalized:
            counts = self._counts_of(self._vocab)
            found = counts.places_ahead([(requests[row], positions[row]) for row in self._penalized])
            places = [-1] * self._places.numel()
            for row, place in zip(self._penalized, found, strict=True):
                places[row] = place
            if places != self._sent:
                self._places.copy_(send(np.array(places, dtype=np.int32), self._device))
                self._sent = places

    def tables_moved(self) -> bool:
        """Whether steps captured before read tables that are no longer the ones. Answers once."""
        outputs = self._counts_of(self._vocab).outputs
        moved = self._captured_with is not None and self._captured_with is not outputs
        self._captured_with = outputs
        return moved

    def penalize(self, logits: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        """Inside the step: what to draw from. The model's own logits stay as they are, for reports."""
        (rows, vocab), counts = logits.shape, self._counts_of(self._vocab)
        assert vocab == counts.vocab
        edited = logits.to(torch.float32, copy=True)
        gpu.count_tokens(ids, positions, self._places[:rows], counts.counted, counts.outputs)
        gpu.penalize(edited, None, self._places[:rows], self._factors[:rows], counts.outputs, counts.prompts)
        return edited

    def report(self, logits: Tensor, sampled: Tensor) -> RowReports | None:
        """Behind the step, before another is launched: what rows asked for; None: nothing."""
        if not self._reported:
            return None
        tops = [self._requests[row].params.logprobs or 0 for row in self._reported]
        return RowReports(self._reported, Report(logits, self._reported_there, sampled, tops))
