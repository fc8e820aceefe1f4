"""Sampling on a GPU: temperature, top-k, top-p, min-p and the draw in one kernel; only token ids leave the device.

Requests that use other features (penalties, grammars, log-probabilities, ...) go through the torch sampler, row by row.
A request always takes the same path, so its tokens do not depend on the rest of the batch; the two paths draw different
tokens from one seed, equally distributed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmill.kernels import triton as gpu
from tokenmill.runtime.sampling.sampler import Sampler
from tokenmill.types import Request, TokenLogprobs


class CudaSampler(Sampler):
    def __init__(self, device: torch.device, kernels: str = "") -> None:
        super().__init__(device, kernels)
        self._device = device
        self._seen: list[Request] = []  # the last batch for which `is_plain` was true

    def is_plain(self, requests: Sequence[Request]) -> bool:
        """Whether one kernel draws for all of them."""
        if self._seen == requests:
            return True
        plain = all(self._drawable(request) for request in requests)
        self._seen = list(requests) if plain else []
        return plain

    def _drawable(self, request: Request) -> bool:
        return request.params.logprobs is None and not request.params.edits_logits

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, requests: Sequence[Request], drafted: Sequence[Sequence[int]] = ()
    ) -> tuple[list[int | None], list[TokenLogprobs | None]]:
        drafted = drafted or [()] * len(requests)
        token_ids: list[int | None] = [None] * len(requests)
        logprobs: list[TokenLogprobs | None] = [None] * len(requests)
        plain = [row for row, request in enumerate(requests) if self._drawable(request)]
        complex_rows = [row for row in range(len(requests)) if row not in set(plain)]
        if plain:
            rows = logits if not complex_rows else logits[plain]
            parameters = self._parameters([requests[row] for row in plain], [len(drafted[row]) for row in plain])
            for row, token_id in zip(plain, gpu.sample(rows, parameters).tolist(), strict=True):
                token_ids[row] = token_id
        if complex_rows:
            rows = logits[complex_rows] if plain else logits
            sampled, records = self._sample(
                rows, [requests[row] for row in complex_rows], [drafted[row] for row in complex_rows]
            )
            for row, token_id, record in zip(complex_rows, sampled, records, strict=True):
                token_ids[row], logprobs[row] = token_id, record
        return token_ids, logprobs

    def _parameters(self, requests: list[Request], num_drafted: list[int]) -> gpu.SamplingTensors:
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
