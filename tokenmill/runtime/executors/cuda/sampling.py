"""Sampling on a GPU: temperature, top-k, top-p, min-p and the draw in one kernel; only token ids leave the device.

Rows that use other features (penalties, grammars, log-probabilities, ...) are drawn by the same kernel, after one pass
over all of them that changes their logits (logit_edits.py): a request draws the same tokens in any batch. The torch
sampler is left for features that have no such pass, and for rows that theirs left without a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokenmill.kernels import triton as gpu
from tokenmill.runtime.executors.cuda.logit_edits import LogitEdits, TokenCounts, send
from tokenmill.runtime.executors.cuda.step_features import Report
from tokenmill.runtime.sampling.features.base import Edits
from tokenmill.runtime.sampling.sampler import Sampler, token_logprobs
from tokenmill.types import Request, TokenLogprobs


class CudaSampler(Sampler):
    def __init__(self, device: torch.device, kernels: str = "") -> None:
        super().__init__(device, kernels)
        self._device = device
        self._seen: list[Request] = []  # the last batch for which `is_plain` was true
        self._seen_in_step: list[Request] = []  # or `draws_in_step`
        self._edits = LogitEdits(device)

    def is_plain(self, requests: Sequence[Request]) -> bool:
        """Whether one kernel draws for all of them."""
        if self._seen == requests:
            return True
        plain = all(self._drawable(request) for request in requests)
        self._seen = list(requests) if plain else []
        return plain

    def draws_in_step(self, requests: Sequence[Request]) -> bool:
        """Whether a captured step draws for all of them, with what step_features.py has: the step after it can be
        queued before the host knows the tokens."""
        if self._seen_in_step == requests:
            return True
        drawn = not any(request.params.edits_otherwise for request in requests)
        self._seen_in_step = list(requests) if drawn else []
        return drawn

    def token_counts(self, vocab: int) -> TokenCounts:
        """Of rows with penalties, by the step and by this sampler."""
        return self._edits.counts(vocab)

    def _drawable(self, request: Request) -> bool:
        return request.params.logprobs is None and not request.params.edits_logits

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, requests: Sequence[Request], drafted: Sequence[Sequence[int]] = ()
    ) -> tuple[list[int | None], list[TokenLogprobs | None]]:
        return self.draw(logits, requests, drafted).finish()

    @torch.inference_mode()
    def draw(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        drafted: Sequence[Sequence[int]] = (),
        rows: list[int] | None = None,
    ) -> Draw:
        """As `sample`, but the device is not waited for: what features change is found out while it computes the
        logits, and other work may be launched behind the draw. Consumes the logits, unless `rows` says which of them
        are those of the requests."""
        drafted = drafted or [()] * len(requests)
        edits, left = self._plan(logits.shape[1], requests, drafted)
        if rows is not None:
            logits = self._picked(logits, rows)
        wanted = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
        # Reported log-probabilities are those of the model, before any penalty or filter.
        asked = send(np.array(wanted, dtype=np.int64), self._device) if wanted else None
        raw = None if asked is None else logits.index_select(0, asked)
        single = {row: logits[row].clone() for row in left}
        self._edits.apply(logits, edits)
        ids = gpu.sample(logits, self._parameters(requests, [len(each) for each in drafted]))
        tops = [requests[row].params.logprobs or 0 for row in wanted]
        report = None
        if raw is not None and asked is not None:
            order = torch.arange(len(wanted), dtype=torch.int32, device=self._device)
            report = Report(raw, order, ids.index_select(0, asked), tops)
        impossible = torch.zeros_like(ids)
        if any(request.params.bans_tokens for request in requests):
            impossible = (logits.gather(1, ids[:, None]).squeeze(1) == float("-inf")).to(ids.dtype)
        fetched = _Fetched(torch.stack([ids, impossible]))

        def choose(row: int) -> int | None:
            """What the device could not draw."""
            if row in single:
                return self._sample(single[row][None], [requests[row]], [drafted[row]])[0][0]
            return self._preferred(edits, row, requests[row], len(drafted[row]))

        return Draw(ids, fetched, choose, list(single), wanted, tops, raw, report)

    @torch.inference_mode()
    def draw_rows(self, logits: Tensor, rows: list[int], requests: Sequence[Request], most: int) -> Draws:
        """For each request from its row of logits, which stay as they are; `most` rows at a time."""
        begins = range(0, len(rows), most)
        return Draws([self.draw(logits, requests[b : b + most], rows=rows[b : b + most]) for b in begins])

    def _picked(self, logits: Tensor, rows: list[int]) -> Tensor:
        """Some rows, as float32 of their own."""
        if rows == list(range(rows[0], rows[0] + len(rows))):
            return logits[rows[0] : rows[-1] + 1].to(torch.float32, copy=True)
        return logits.index_select(0, send(np.array(rows, dtype=np.int64), self._device)).to(torch.float32)

    def _plan(
        self, vocab: int, requests: Sequence[Request], drafted: Sequence[Sequence[int]]
    ) -> tuple[Edits, list[int]]:
        """What features change, and the rows that have one which cannot say."""
        edits, left = Edits(vocab), []
        for feature in self._logit_features:
            feature.prepare(requests, drafted)
        for row, request in enumerate(requests):
            params = request.params
            if not params.edits_logits:
                continue
            active = [feature for feature in self._logit_features if feature.active(params)]
            if not all(feature.plan(edits, row, request, drafted[row]) for feature in active):
                left.append(row)
        return edits, left

    def _preferred(self, edits: Edits, row: int, request: Request, num_drafted: int) -> int | None:
        """Where no token is possible: one of those that come first then; None: the request ends."""
        bits = edits.preferred.get(row)
        if bits is None:
            return None
        logits = torch.full((1, edits.vocab), 0.0, device=self._device)
        only = Edits(edits.vocab, allowed={0: bits})
        self._edits.apply(logits, only)
        return int(gpu.sample(logits, self._parameters([request], [num_drafted]))[0])

    def _parameters(self, requests: Sequence[Request], num_drafted: list[int]) -> gpu.SamplingTensors:
        floats = torch.tensor([cutoffs(request) for request in requests], dtype=torch.float32).t().contiguous()
        integers = torch.tensor(
            [[top_k(r), seed(r), r.num_tokens + extra] for r, extra in zip(requests, num_drafted, strict=True)],
            dtype=torch.int64,
        )
        floats, integers = self._to_device(floats), self._to_device(integers.t().contiguous())
        filtered = any(is_filtered(request) for request in requests)
        return gpu.SamplingTensors(
            floats[0], integers[0].int(), floats[1], floats[2], integers[1], integers[2], filtered
        )

    def _to_device(self, values: Tensor) -> Tensor:
        """Without waiting for kernels that still run."""
        pinned = values.pin_memory() if self._device.type == "cuda" else values
        return pinned.to(self._device, non_blocking=True)


class _Fetched:
    """A small tensor on its way to the host, behind what was launched so far."""

    def __init__(self, values: Tensor) -> None:
        self._host, self._event = values, None
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def tolist(self) -> list[list[int]]:
        if self._event is not None:
            self._event.synchronize()
        values: list[list[int]] = self._host.tolist()
        return values


@dataclass(slots=True, eq=False)
class Draw:
    """Tokens that the device is drawing."""

    ids: Tensor  # int64 [R], on the device
    fetched: _Fetched  # ids, and which of them are impossible
    choose: Callable[[int], int | None]  # by row: what the host draws instead
    left: list[int]  # rows with features that the device does not have: drawn by the host in any case
    wanted: list[int]  # rows that asked for log-probabilities
    tops: list[int]
    raw: Tensor | None  # their logits, before all features
    report: Report | None
    redrawn: bool = False  # after `finish`: some tokens are not those in `ids`

    @torch.inference_mode()
    def finish(self) -> tuple[list[int | None], list[TokenLogprobs | None]]:
        """Wait for it. The token is None for a row in which no token is possible."""
        drawn, impossible = self.fetched.tolist()
        token_ids: list[int | None] = list(drawn)
        for row in {*self.left, *(row for row, fails in enumerate(impossible) if fails)}:
            token_ids[row] = self.choose(row)
            self.redrawn = True
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        if self.raw is not None and self.report is not None:
            for number, (row, record) in enumerate(zip(self.wanted, self.report.records(), strict=True)):
                token = token_ids[row]
                if token is not None and token != record.token_id:  # chosen by the host
                    record = token_logprobs(self.raw[number].log_softmax(-1), token, self.tops[number])
                logprobs[row] = None if token is None else record
        return token_ids, logprobs


@dataclass(slots=True, eq=False)
class Draws:
    """The rows of a step, as parts one after the other."""

    parts: list[Draw]

    @property
    def ids(self) -> Tensor:
        return torch.cat([part.ids for part in self.parts])

    @property
    def waits(self) -> bool:
        return any(part.left for part in self.parts)

    @property
    def redrawn(self) -> bool:
        return any(part.redrawn for part in self.parts)

    def finish(self) -> tuple[list[int | None], list[TokenLogprobs | None]]:
        results = [part.finish() for part in self.parts]
        return [each for tokens, _ in results for each in tokens], [each for _, found in results for each in found]


def cutoffs(request: Request) -> tuple[float, float, float]:
    """Temperature, top-p, min-p."""
    params = request.params
    return params.temperature, params.top_p, params.min_p


def top_k(request: Request) -> int:
    return max(0, request.params.top_k)


def seed(request: Request) -> int:
    mixed: int = gpu.mix_seed(request.seed, request.index)
    return mixed


def is_filtered(request: Request) -> bool:
    """Whether the request samples from a part of the vocabulary."""
    params = request.params
    return not params.greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
