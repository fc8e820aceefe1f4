"""Synthetic load: Poisson or bursty arrivals, lengths around a mean, a shared prefix; and times for traces without any.

The same seed gives the same load. Knows nothing of engines; called by the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random

from tokenmill.bench.trace_rows import BLOCK_TOKENS
from tokenmill.errors import UserError
from tokenmill.plan.simulate.workload import Arrival


@dataclass(frozen=True, slots=True)
class SyntheticLoad:
    """`spread`: lengths are even over [1 - spread, 1 + spread] x the mean. `prefixes`: number of distinct shared
    prefixes of `shared_prefix` tokens."""

    input_tokens: int
    output_tokens: int
    requests: int
    spread: float = 0.0
    shared_prefix: int = 0
    prefixes: int = 1

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens", "requests", "prefixes"):
            if getattr(self, name) < 1:
                raise UserError(f"{name.replace('_', ' ')} is {getattr(self, name)}", "give at least 1")
        if not 0 <= self.spread < 1:
            raise UserError(f"the spread of lengths is {self.spread:g}", "give 0 to less than 1")
        if not 0 <= self.shared_prefix <= self.input_tokens:
            raise UserError(
                f"a shared prefix of {self.shared_prefix} tokens does not fit prompts of {self.input_tokens}",
                "lower --shared-prefix",
            )


def synthetic_arrivals(load: SyntheticLoad, seed: int) -> Iterator[Arrival]:
    """Rows without times. Prefixes are whole blocks, the nearest number of them."""
    random = Random(f"{seed}/lengths")
    blocks = round(load.shared_prefix / BLOCK_TOKENS) if load.shared_prefix else 0
    for number in range(load.requests):
        factor_in, factor_out = (1 + load.spread * (2 * random.random() - 1) for _ in range(2))
        which = random.randrange(load.prefixes)
        shared = tuple(which * blocks + i for i in range(blocks))
        prompt = max(1, blocks * BLOCK_TOKENS, round(load.input_tokens * factor_in))
        yield Arrival(number, 0.0, prompt, max(1, round(load.output_tokens * factor_out)), shared)


def at_rate(arrivals: Iterable[Arrival], rate: float, variation: float, seed: int) -> Iterator[Arrival]:
    """Give rows times: a gamma renewal process of `rate` requests a second; `variation` 1 is Poisson, 0 is even."""
    if rate <= 0 or variation < 0:
        raise UserError(
            f"a rate of {rate:g} with variation {variation:g} is invalid",
            "give --rate above 0 and --burstiness of at least 0",
        )
    random = Random(f"{seed}/arrivals")
    shape = 1.0 / variation**2 if variation else 0.0
    ms = 0.0
    for number, arrival in enumerate(arrivals):
        yield replace(arrival, number=number, ms=ms)
        ms += 1e3 * (random.gammavariate(shape, 1.0 / (rate * shape)) if shape else 1.0 / rate)
