"""Whether a grammar from outside may reach the engine: compiled as there, then followed for some random tokens.

Meant for a process that may crash or be killed; the engine compiles what passed here a second time. Called by the
server's text workers.
"""

from __future__ import annotations

import random
import time

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from tokenmill.errors import UserError
from tokenmill.grammar.compiler import MASK_SECONDS, compile_grammar
from tokenmill.types import StructuredSpec

_NUM_WALKS = 2
_NUM_TOKENS = 24  # of each walk
_BURST_SECONDS = 0.02  # beyond what each mask may take: less than what the engine allows


def check_grammar(spec: StructuredSpec, vocabulary: LLTokenizer) -> None:
    """Raises UserError if the grammar cannot be compiled, or if its masks take too long."""
    grammar = compile_grammar(spec, vocabulary)
    times: list[float] = []
    for seed in range(_NUM_WALKS):
        times += _walk(grammar.matcher(), vocabulary.vocab_size, random.Random(seed))
    if sum(times) > _BURST_SECONDS + MASK_SECONDS * len(times):
        raise UserError(f"the {spec.kind} takes too long to follow", "make it smaller or simpler")


def _walk(matcher: LLMatcher, vocab_size: int, choice: random.Random) -> list[float]:
    """Processor seconds of each mask along one random output."""
    bits = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
    times = []
    for _ in range(_NUM_TOKENS):
        began = time.thread_time()
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        times.append(time.thread_time() - began)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab_size])
        if matcher.is_error() or not len(allowed):
            break
        matcher.consume_token(int(allowed[choice.randrange(len(allowed))]))
        if matcher.is_error() or matcher.is_stopped():
            break
    return times
