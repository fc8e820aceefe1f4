"""The logit features of all rows of a step in one pass on the device: penalties, biases, bans, masks.

What a request said and was told so far stays on the device, as counts by token: a step sends one token of each row.
Called by the sampler; the features themselves say what they change (runtime/sampling/features).
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
from torch import Tensor

from tokenmill.grammar.vocabulary import Bits
from tokenmill.kernels import triton as gpu
from tokenmill.runtime.executors.cuda.mask_table import MaskTable
from tokenmill.runtime.sampling.features.base import Edits
from tokenmill.types import Request

_NEVER = float("-inf")
_FIRST_PLACES = 16


class LogitEdits:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts: TokenCounts | None = None
        self._masks: MaskTable | None = None

    def apply(self, logits: Tensor, edits: Edits) -> None:
        """Change logits float32 [R, vocab] in place. Does not wait for the device."""
        if edits.penalized:
            self._penalize(logits, edits, self.counts(logits.shape[1]))
        if edits.added:
            pairs = [(row, token) for row, bias in edits.added.items() for token in bias]
            values = [value for bias in edits.added.values() for value in bias.values()]
            rows, tokens = self._send(np.array(pairs, dtype=np.int64).T)
            logits.index_put_((rows, tokens), self._send(np.array(values, dtype=np.float32)), accumulate=True)
        banned = [(row, token) for row, tokens in edits.banned.items() for token in tokens]
        if banned:
            rows, tokens = self._send(np.array(banned, dtype=np.int64).T)
            logits.index_put_((rows, tokens), torch.full((), _NEVER, device=self._device))
        if edits.allowed:
            self._allow(logits, edits.allowed)
        if edits.typical:
            _keep_typical(logits, edits.typical)

    def counts(self, vocab: int) -> TokenCounts:
        if self._counts is None or self._counts.vocab != vocab:
            self._counts = TokenCounts(vocab, self._device)
        return self._counts

    def _penalize(self, logits: Tensor, edits: Edits, counts: TokenCounts) -> None:
        places = counts.places(list(edits.penalized.values()))
        params = [request.params for request, _ in edits.penalized.values()]
        factors = [(each.repetition_penalty, each.frequency_penalty, each.presence_penalty) for each in params]
        numbers = self._send(np.array([list(edits.penalized), places], dtype=np.int32))
        factors_there = self._send(np.array(factors, dtype=np.float32))
        gpu.penalize(logits, numbers[0], numbers[1], factors_there, counts.outputs, counts.prompts)
        counts.end_step()

    def _allow(self, logits: Tensor, allowed: dict[int, Bits]) -> None:
        """Masks that come again are on the device already, the others are sent."""
        kept = {row: bits for row, bits in allowed.items() if not bits.flags.writeable}
        places: dict[int, int] = {}
        if kept:
            if self._masks is None:
                self._masks = MaskTable(self._device, next(iter(kept.values())).size, self._send)
            places = self._masks.places(kept)
            self._allow_places(logits, places, self._masks.bits)
        sent = {row: bits for row, bits in allowed.items() if row not in places}
        if sent:
            table = np.zeros((len(sent), max(bits.size for bits in sent.values())), dtype=np.int32)
            for number, bits in enumerate(sent.values()):
                table[number, : bits.size] = bits
            self._allow_places(logits, dict(zip(sent, range(len(sent)), strict=True)), self._send(table))

    def _allow_places(self, logits: Tensor, places: dict[int, int], bits: Tensor) -> None:
        if places:
            numbers = self._send(np.array([list(places), list(places.values())], dtype=np.int32))
            gpu.allow(logits, numbers[0], numbers[1], bits)

    def _send(self, values: np.ndarray) -> Tensor:
        return send(np.ascontiguousarray(values), self._device)


class TokenCounts:
    """Of each request with penalties: how often its output has each token, and which tokens its prompt has."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab, self._device = vocab, device
        self.outputs = torch.zeros(_FIRST_PLACES, vocab, dtype=torch.int16, device=device)
        self.prompts = torch.zeros(_FIRST_PLACES, vocab, dtype=torch.int8, device=device)
        self.counted = torch.zeros(_FIRST_PLACES, dtype=torch.int32, device=device)  # tokens of the place's sequence
        self._free = list(range(_FIRST_PLACES))
        self._place: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        # Tokens that are in the tables, or will be when the steps launched so far have run.
        self._counted: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._borrowed: list[int] = []  # for rows with drafts, until the end of the step

    def places(self, rows: list[tuple[Request, Sequence[int]]]) -> list[int]:
        """The place of each row in the tables, which then have all of the row's tokens, drafted ones too."""
        known = self._enter_tokens([(request, request.num_tokens) for request, _ in rows])
        in_outputs: list[tuple[int, int]] = []
        places = []
        for place, (_, drafted) in zip(known, rows, strict=True):
            if drafted:
                source, place = place, self._take()
                self._borrowed.append(place)
                self.outputs[place], self.prompts[place] = self.outputs[source], self.prompts[source]
                in_outputs += [(place, token) for token in drafted]
            places.append(place)
        self._enter([], in_outputs)
        return places

    def places_ahead(self, rows: list[tuple[Request, int]]) -> list[int]:
        """As `places`, for rows (each another request) whose last token, at the position given, is only known on the
        device: the step that reads it enters it itself (`gpu.count_tokens`)."""
        places = self._enter_tokens(rows)
        for request, position in rows:
            self._counted[request] = max(self._counted[request], position + 1)
        return places

    def _enter_tokens(self, rows: list[tuple[Request, int]]) -> list[int]:
        """Enter what is missing of the first so many tokens of each request; returns their places."""
        in_prompts: list[tuple[int, int]] = []
        in_outputs: list[tuple[int, int]] = []
        lengths: dict[int, int] = {}
        places = []
        for request, length in rows:
            place = self._place.get(request)
            if place is None:
                place = self._place[request] = self._take()
                finalize(request, self._free.append, place)
                self._counted[request] = 0
                in_prompts += [(place, token) for token in set(request.prompt_ids)]
            counted = self._counted[request]
            if counted < length:
                begin = max(counted, len(request.prompt_ids))
                in_outputs += [(place, token) for token in request.token_ids[begin:length]]
                self._counted[request] = lengths[place] = length
            places.append(place)
        self._enter(in_prompts, in_outputs)
        if lengths:
            numbers = send(np.array([list(lengths), list(lengths.values())], dtype=np.int64), self._device)
            self.counted[numbers[0]] = numbers[1].int()
        return places

    def end_step(self) -> None:
        self._free += self._borrowed
        self._borrowed.clear()

    def _enter(self, in_prompts: list[tuple[int, int]], in_outputs: list[tuple[int, int]]) -> None:
        if in_prompts:
            places, tokens = send(np.array(in_prompts, dtype=np.int64).T.copy(), self._device)
            self.prompts[places, tokens] = 1
        if in_outputs:
            places, tokens = send(np.array(in_outputs, dtype=np.int64).T.copy(), self._device)
            one = torch.ones((), dtype=torch.int16, device=self._device)
            self.outputs.index_put_((places, tokens), one, accumulate=True)

    def _take(self) -> int:
        if not self._free:
            size = self.outputs.shape[0]
            self.outputs = torch.cat([self.outputs, torch.zeros_like(self.outputs)])
            self.prompts = torch.cat([self.prompts, torch.zeros_like(self.prompts)])
            self.counted = torch.cat([self.counted, torch.zeros_like(self.counted)])
            self._free += range(size, 2 * size)
        place = self._free.pop()
        self.outputs[place] = 0
        self.prompts[place] = 0
        self.counted[place] = 0
        return place


def _keep_typical(logits: Tensor, rows: dict[int, tuple[float, float]]) -> None:
    """As the feature `typical` does for one row."""
    numbers = torch.tensor(list(rows), device=logits.device)
    masses, temperatures = torch.tensor(list(rows.values()), device=logits.device).unbind(1)
    logprobs = (logits[numbers] / temperatures[:, None]).log_softmax(-1)
    probabilities = logprobs.exp()
    entropy = -torch.nansum(probabilities * logprobs, -1, keepdim=True)
    order = (-logprobs - entropy).abs().argsort(-1)
    mass = probabilities.gather(1, order).cumsum(-1)
    kept = (mass < masses[:, None]).sum(-1, keepdim=True) + 1
    beyond = torch.arange(order.shape[1], device=logits.device)[None, :] >= kept
    banned = torch.zeros_like(beyond).scatter_(1, order, beyond)
    logits[numbers] = logits[numbers].masked_fill(banned, _NEVER)


def send(values: np.ndarray, device: torch.device) -> Tensor:
    """Without waiting for kernels that still run."""
    here = torch.from_numpy(values)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here
