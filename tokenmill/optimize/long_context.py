"""Long contexts: what a KV dtype or a KV budget loses where short windows cannot show it.

At each length, divergence from the baseline over the last tokens of a window of the quality text, and a passkey hidden
in that text at several depths: how likely the right key is beside distractors. Only for configurations whose KV cache
is not the baseline's. Builds what is asked and judges the figures; called by quality.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.engine.llm import LLM
from tokenmill.evaluate.likelihood import continuation_logprobs
from tokenmill.evaluate.statistics import mean
from tokenmill.evaluate.windows import Window, added_bos
from tokenmill.optimize.results import Check

DEPTHS = (0.1, 0.5, 0.9)  # of the text, at which the passkey is hidden
_SCORED = 512  # tokens at the end of a window; a quarter of a shorter one
_DISTRACTORS = 3
_MIN_FOUND = 0.5  # mean probability from which the baseline can be said to find the key
_MIN_FALL = 0.15  # of that probability: falls below it are noise
_CONTROL_ERRORS = 2.0
_HIDDEN = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
_ASKED = "\nWhat is the pass key? The pass key is"


@dataclass(frozen=True, slots=True)
class Passkey:
    context: list[int]
    answers: list[list[int]]  # the right one first


def usable_lengths(lengths: Sequence[int], short: int, model_context: int) -> tuple[int, ...]:
    """Within the model's context, ascending; what the short windows cover already is left out."""
    return tuple(sorted({min(length, model_context) for length in lengths if min(length, model_context) > short}))


def long_window(text: str, tokenizer: Tokenizer, length: int) -> Window:
    """One window: the text from its beginning, repeated where it is shorter than the length."""
    ids = _filler(text, tokenizer, length)
    bos = added_bos(tokenizer)
    if bos is not None:
        ids[0] = bos
    return Window(ids, length - min(_SCORED, length // 4))


def passkeys(text: str, tokenizer: Tokenizer, length: int) -> list[Passkey]:
    """One item for each depth, of at most `length` tokens with its answer."""
    return [_passkey(text, tokenizer, length, depth, Random(f"{length} {depth}")) for depth in DEPTHS]


def _passkey(text: str, tokenizer: Tokenizer, length: int, depth: float, random: Random) -> Passkey:
    keys = [str(key) for key in random.sample(range(10_000, 100_000), 1 + _DISTRACTORS)]

    def encode(words: str) -> list[int]:
        return tokenizer.encode(words, add_special_tokens=False)

    answers = [encode(f" {key}") for key in keys]
    hidden, asked = encode(_HIDDEN.format(key=keys[0])), encode(_ASKED)
    bos = added_bos(tokenizer)
    opening = [] if bos is None else [bos]
    room = length - len(opening) - len(hidden) - len(asked) - max(map(len, answers))
    filler = _filler(text, tokenizer, max(0, room))
    place = int(depth * len(filler))
    return Passkey([*opening, *filler[:place], *hidden, *filler[place:], *asked], answers)


def _filler(text: str, tokenizer: Tokenizer, length: int) -> list[int]:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokens, "no text to fill a context with"
    return (tokens * (length // len(tokens) + 1))[:length]


def find_keys(llm: LLM, items: Sequence[Passkey]) -> list[float]:
    """For each item, the probability of the right key among the answers."""
    pairs = [(item.context, answer) for item in items for answer in item.answers]
    scores = iter(continuation_logprobs(llm.parts, pairs))
    found = []
    for item in items:
        logprobs = np.array([next(scores).logprob for _ in item.answers])
        found.append(float(np.exp(logprobs[0] - np.logaddexp.reduce(logprobs))))
    return found


def retrieval_check(
    length: int, candidate: Sequence[float], baseline: Sequence[float], control: Sequence[float]
) -> Check:
    """Refused where the right key becomes less likely than the baseline's own variation explains."""
    name = f"retrieval at {length}"
    value, reference = mean(candidate).value, mean(baseline).value
    if reference < _MIN_FOUND:
        note = f"skipped: the baseline itself gives the right key {reference:.0%} among {1 + _DISTRACTORS}"
        return Check(name, value, reference, 0.0, note=note)
    drift = mean(np.subtract(control, baseline))
    limit = max(0.0, reference - max(_MIN_FALL, abs(drift.value) + _CONTROL_ERRORS * drift.stderr))
    words = (
        f"a passkey in a context of {length} tokens is found with a probability of {value:.0%}, by the baseline with "
        f"{reference:.0%}, less than {limit:.0%}"
    )
    return Check(name, value, reference, limit, "" if value >= limit else words)


def divergence_check(length: int, kld: float, limit: float) -> Check:
    words = f"mean divergence {kld:.4g} at a context of {length} tokens is more than {limit:.4g} nats"
    return Check(f"divergence at {length}", kld, 0.0, limit, "" if kld <= limit else words)
