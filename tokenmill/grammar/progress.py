"""How far one output is in its grammar: follows tokens and drafted ones, and says which may come next.

Masks are kept for the drafted tokens of the present step, because the drafter and the sampler ask for the same ones;
where the grammar has states, also by state, for all outputs that come there (kept_masks.py). Where the grammar ran into
a limit, or its masks take so long that they delay other requests, there is no mask any more. Called by the sampler's
grammar feature and by the grammar drafter; knows neither logits nor requests.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from tokenmill.grammar.compiler import MASK_BURST_SECONDS, MASK_SECONDS
from tokenmill.grammar.kept_masks import Place
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
        self._kept = grammar.masks
        # Behind the output, and behind each drafted token.
        self._places: list[Place | None] = [None if self._kept is None else self._kept.start]
        self._seconds_left = MASK_BURST_SECONDS  # of processor time, for masks

    def follow(self, output: list[int], drafted: Sequence[int]) -> bool:
        """Consume the output since the last time, then `drafted`; drafted tokens of last time that do not follow
        now are rolled back. False if that is not possible: start over."""
        new = output[self._num_output :]
        following = [*new, *drafted]
        same = _num_same(self._drafted, following)
        extra = len(self._drafted) - same
        if extra:
            # A matcher that has stopped takes back one token too many.
            if self._matcher.is_error() or self._matcher.is_stopped() or not self._matcher.rollback(extra):
                return False
            del self._places[same + 1 :]
        for token_id in following[same:]:
            self._matcher.consume_token(token_id)
            self._go_on(token_id)
        if new:
            count, path = len(new), tuple(new)
            del self._places[:count]
            self._masks = {key[count:]: mask for key, mask in self._masks.items() if key[:count] == path}
        self._num_output, self._drafted = len(output), list(drafted)
        return True

    def is_at(self, num_output: int, drafted: Sequence[int]) -> bool:
        """Whether `follow` has nothing to do for an output of this length."""
        return num_output == self._num_output and self._drafted == list(drafted)

    def moved(self, lane: int, output: list[int]) -> GrammarProgress:
        """The same output in another lane of the grammar, without drafted tokens."""
        other = GrammarProgress(self.grammar, lane)
        other._seconds_left = self._seconds_left
        other.follow(output, ())
        return other

    def advance(self, token_id: int) -> bool:
        """Consume one more drafted token; False if nothing can follow it."""
        self._drafted.append(token_id)
        self._go_on(token_id)
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
        """The tokens that may come next; None where no token is possible. Not to be changed: others share it."""
        path = tuple(self._drafted)
        bits = self._masks.get(path)
        if bits is not None:
            return bits
        if self._matcher.is_error() or self._seconds_left < 0:
            return None
        place = self._places[-1]
        bits = None if self._kept is None or place is None else self._kept.find(place)
        if bits is None:
            bits = self._computed()
            if bits is not None and self._kept is not None and place is not None:
                bits = self._kept.keep(place, bits)
        else:
            self._took(0.0)
        if bits is not None:
            self._masks[path] = bits
        return bits

    def lacks(self) -> Hashable | None:
        """What `mask` would compute, the same for outputs that share it; None if it is known."""
        if tuple(self._drafted) in self._masks:
            return None
        place = self._places[-1]
        if self._kept is None or place is None:
            return self
        return place.key if self._kept.find(place) is None else None

    def _computed(self) -> Bits | None:
        bits = np.zeros((self._vocab_size + 31) // 32, dtype=np.int32)
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._took(time.thread_time() - began)
        return None if self._matcher.is_error() or not bits.any() else bits

    def _took(self, seconds: float) -> None:
        self._seconds_left = min(self._seconds_left + MASK_SECONDS - seconds, MASK_BURST_SECONDS)
        self.grammar.mask_seconds += (1 - _DECAY) * (seconds - self.grammar.mask_seconds)

    def _go_on(self, token_id: int) -> None:
        place = self._places[-1]
        self._places.append(None if self._kept is None or place is None else self._kept.after(place, token_id))

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


def _num_same(before: Sequence[int], now: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    for number, (one, other) in enumerate(zip(before, now, strict=False)):
        if one != other:
            return number
    return min(len(before), len(now))
