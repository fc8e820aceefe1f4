"""The workload: what users send, and the latencies they are promised.

Owns the record, its range checks and the presets of common uses. Knows nothing of models or hardware.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tokenmill.errors import UserError, unknown_name


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How requests arrive. `lockstep`: users of a benchmark who all start at once and send the next request on
    completion; `poisson`: users who have drifted apart; `trace`: as recorded, with the burstiness of its gaps."""

    kind: str = "poisson"
    burstiness: float = 1.0  # coefficient of variation of the gaps between arrivals
    words: str = ""  # where a trace's figures come from

    def __post_init__(self) -> None:
        if self.kind not in ARRIVALS:
            raise unknown_name("kind of arrivals", self.kind, ARRIVALS)


ARRIVALS = ("lockstep", "poisson", "trace")


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths in tokens, times in milliseconds; 0 leaves a promise out. Load is `concurrency` users or `rate`
    requests per second; `prefix_share` of every prompt is found in the cache."""

    input_tokens: int = 1024
    output_tokens: int = 256
    concurrency: int = 0
    rate: float = 0.0
    prefix_share: float = 0.0
    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    arrivals: Arrivals = Arrivals()

    def __post_init__(self) -> None:
        if self.input_tokens < 1 or self.output_tokens < 1:
            raise UserError("a request has at least one token in and one out", "raise --input-len and --output-len")
        if self.rate < 0 or self.concurrency < 0 or (self.rate and self.concurrency):
            raise UserError("the load is either --concurrency or --rate, at least 0", "give one of them")
        if not 0 <= self.prefix_share < 1:
            raise UserError(f"--prefix-share {self.prefix_share} is not in [0, 1)", "0.8: four fifths are cached")
        if self.ttft_ms < 0 or self.itl_ms < 0:
            raise UserError("a latency limit is negative", "--ttft and --itl are milliseconds, 0 for none")

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens that must be computed."""
        return max(1, round(self.input_tokens * (1 - self.prefix_share)))

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens


_PRESETS = {  # lengths and promises as people state them; the load is the caller's
    "chat": Workload(1024, 256, ttft_ms=500, itl_ms=50),
    "agent": Workload(8192, 512, prefix_share=0.8, ttft_ms=1000, itl_ms=50),
    "rag": Workload(6144, 384, prefix_share=0.3, ttft_ms=1500, itl_ms=60),
    "summarize": Workload(6144, 256, ttft_ms=3000, itl_ms=100),
    "code": Workload(2048, 128, prefix_share=0.5, ttft_ms=300, itl_ms=30),
    "batch": Workload(1024, 512),
}


def preset(name: str, **given: Any) -> Workload:
    """A preset, overridden by the caller's figures."""
    if name not in _PRESETS:
        raise unknown_name("workload", name, _PRESETS)
    return replace(_PRESETS[name], **given)


_ACCEPTANCE = {"code": 0.8}  # of drafts: code repeats its prompt and itself
_DEFAULT_ACCEPTANCE = 0.6


def usual_acceptance(name: str) -> float:
    """Assumed share of accepted drafts for a preset, before anything is measured."""
    return _ACCEPTANCE.get(name, _DEFAULT_ACCEPTANCE)
