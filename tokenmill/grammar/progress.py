"""How far one output is in its grammar: follows tokens and drafted ones, and says which may come next.

Masks are kept for the drafted tokens of the present step, because the drafter and the sampler ask for the same ones.
Where the grammar ran into a limit, or its masks take so long that they delay other requests, there is no mask any more.
Called by the sampler's grammar feature and by the grammar drafter; knows neither logits nor requests.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokenmill.grammar.compiler import MASK_BURST_SECONDS, MASK_SECONDS
from tokenmill.grammar.vocabulary import Bits
from tokenmill.types import CompiledGrammar

_DECAY = 0.95  # of the moving average of a grammar's masks


class GrammarProgress:
    def __init__(self, grammar: CompiledGrammar, lane: int = 0) -> None:
        self.grammar, self.lane = grammar, lane
        self._matcher = grammar.matcher(lane)
        self._vocab_size = grammar.vocab_size
        self._num_output = 0  # of the request's own tokens, how many the matcher has consumed
        self._drafted: list[int] = []  # consumed after them
        self._masks: dict[tuple[int, ...], Bits] = {}  # by the drafted tokens before
        self._seconds_left = MASK_BURST_SECONDS  # of processor time, for masks

    def follow(self, output: list[int], drafted: Sequence[int]) -> bool:
        """Consume the output since the last time, then `drafted`; drafted tokens of last time that do not follow
        now are rolled back. False if that is not possible: start over."""
        new = output[self._num_output :]
        following = [*new, *drafted]
        pairs = zip(self._drafted, following, strict=False)
        shorter = min(len(self._drafted), len(following))
        same = next((n for n, (before, now) in enumerate(pairs) if before != now), shorter)
        extra = len(self._drafted) - same
        if extra and (self._matcher.is_error() or not self._matcher.rollback(extra)):
            return False
        for token_id in following[same:]:
            self._matcher.consume_token(token_id)
        if new:
            count, path = len(new), tuple(new)
            self._masks = {key[count:]: mask for key, mask in self._masks.items() if key[:count] == path}
        self._num_output, self._drafted = len(output), list(drafted)
        return True

    def moved(self, lane: int, output: list[int]) -> GrammarProgress:
        """The same output in another lane of the grammar, without drafted tokens."""
        other = GrammarProgress(self.grammar, lane)
        other._seconds_left = self._seconds_left
        other.follow(output, ())
        return other

    def advance(self, token_id: int) -> bool:
        """Consume one more drafted token; False if nothing can follow it."""
        self._drafted.append(token_id)
        return bool(self._matcher.consume_token(token_id)) and not self._matcher.is_stopped()

    @property
    def is_cheap(self) -> bool:
        """Whether masks may be computed that the output may not need: they would shorten the time of those it does."""
        return self._seconds_left >= MASK_BURST_SECONDS / 2

    def valid(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens the grammar accepts next, one after the other. Does not consume them."""
        if self._matcher.is_error() or self._matcher.is_stopped():
            return 0
        known = next((n for n, token_id in enumerate(token_ids) if token_id >= self._vocab_size), len(token_ids))
        count: int = self._matcher.validate_tokens(list(token_ids[:known]))
        return max(0, count)

    def mask(self) -> Bits | None:
        """The tokens that may come next; None where no token is possible. Not to be changed."""
        path = tuple(self._drafted)
        known = self._masks.get(path)
        if known is not None:
            return known
        if self._matcher.is_error() or self._seconds_left < 0:
            return None
        bits = np.zeros((self._vocab_size + 31) // 32, dtype=np.int32)
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        seconds = time.thread_time() - began
        self._seconds_left = min(self._seconds_left + MASK_SECONDS - seconds, MASK_BURST_SECONDS)
        self.grammar.mask_seconds += (1 - _DECAY) * (seconds - self.grammar.mask_seconds)
        if self._matcher.is_error():
            return None
        self._masks[path] = bits
        return bits

    def banned(self, num_logits: int) -> NDArray[np.bool_]:
        """[num_logits]: True for tokens that the grammar does not allow next."""
        result = np.ones(num_logits, dtype=np.bool_)
        bits = self.mask()
        if bits is not None:
            size = min(num_logits, self._vocab_size)
            result[:size] = np.unpackbits(~bits.view(np.uint8), bitorder="little")[:size]
        return result

    def problem(self) -> str:
        if self._seconds_left < 0:
            return "its grammar takes too long to follow"
        return f"its grammar allows no token ({' '.join(self._matcher.get_error().split())[:200]})"
