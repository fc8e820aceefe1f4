"""Synthetic prompts: random token ids of chosen lengths, the same for the same seed.

Random ids compute exactly as text does and share no prefix unless asked to. Knows nothing of engines. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor
from random import Random

from tokenmill.errors import UserError


@dataclass(frozen=True, slots=True)
class SyntheticRequest:
    prompt_ids: list[int]
    output_len: int


def random_requests(
    vocab_size: int,
    count: int,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    shared_prefix: int = 0,
    seed: int = 0,
) -> list[SyntheticRequest]:
    """`count` requests with lengths uniform in [len * (1 - ratio), len * (1 + ratio)].

    The `shared_prefix` tokens that all prompts begin with come on top of the input length.
    """
    _check(count, input_len, output_len, range_ratio, shared_prefix)
    random = Random(seed)
    prefix = _random_ids(random, vocab_size, shared_prefix)
    requests = []
    for _ in range(count):
        body = _random_ids(random, vocab_size, _length(random, input_len, range_ratio))
        requests.append(SyntheticRequest(prefix + body, _length(random, output_len, range_ratio)))
    return requests


def longest_request(input_len: int, output_len: int, range_ratio: float = 0.0, shared_prefix: int = 0) -> int:
    """Tokens of the longest request that `random_requests` can make: the context it needs."""
    return shared_prefix + ceil(input_len * (1 + range_ratio)) + ceil(output_len * (1 + range_ratio))


def _random_ids(random: Random, vocab_size: int, count: int) -> list[int]:
    return [random.randrange(vocab_size) for _ in range(count)]


def _length(random: Random, length: int, ratio: float) -> int:
    return random.randint(max(1, floor(length * (1 - ratio))), ceil(length * (1 + ratio)))


def _check(count: int, input_len: int, output_len: int, range_ratio: float, shared_prefix: int) -> None:
    for name, value, low in (
        ("the number of prompts", count, 1),
        ("input length", input_len, 1),
        ("output length", output_len, 1),
        ("shared prefix", shared_prefix, 0),
    ):
        if value < low:
            raise UserError(f"{name} is {value}", f"give at least {low}")
    if not 0 <= range_ratio < 1:
        raise UserError(f"range ratio is {range_ratio:g}", "give 0 to below 1")
