"""Sampling on a GPU: temperature, top-k, top-p, min-p and the draw in one kernel; ids are all that leaves the device.

Requests with anything more (penalties, grammars, log-probabilities, ...) go through the plain sampler, row by row. A
request always takes the same one of the two ways, so its tokens do not depend on its neighbours; the two ways draw
different, equally distributed tokens from one seed.
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
        self._seen: list[Request] = []  # the last batch that was found plain

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
        others = [row for row in range(len(requests)) if row not in set(plain)]
        if plain:
            rows = logits if not others else logits[plain]
            parameters = self._parameters([requests[row] for row in plain], [len(drafted[row]) for row in plain])
            for row, token_id in zip(plain, gpu.sample(rows, parameters).tolist(), strict=True):
                token_ids[row] = token_id
        if others:
            rows = logits[others] if plain else logits
            found, reported = self._sample(rows, [requests[row] for row in others], [drafted[row] for row in others])
            for row, token_id, report in zip(others, found, reported, strict=True):
                token_ids[row], logprobs[row] = token_id, report
        return token_ids, logprobs

    def _parameters(self, requests: list[Request], num_drafted: list[int]) -> gpu.SamplingTensors:
        floats = torch.tensor([cutoffs(request) for request in requests], dtype=torch.float32).t().contiguous()
        whole = torch.tensor(
            [[top_k(r), seed(r), r.num_tokens + extra] for r, extra in zip(requests, num_drafted, strict=True)],
            dtype=torch.int64,
        )
        floats, whole = self._sent(floats), self._sent(whole.t().contiguous())
        filtered = any(is_filtered(request) for request in requests)
        return gpu.SamplingTensors(floats[0], whole[0].int(), floats[1], floats[2], whole[1], whole[2], filtered)

    def _sent(self, values: Tensor) -> Tensor:
        """On the device, without waiting for what it still computes."""
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
    params = request.params
    return not params.greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
