"""What callers get back, in the shape vLLM users know. Filled by collector.py; knows nothing of scheduling."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.types import CacheReport


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]  # token id -> log-probability at one position


@dataclass(slots=True)
class CompletionOutput:
    """One of the n answers to a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # a stop token that ended it is the last one
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None  # "stop", "length", "abort"
    stop_reason: int | str | None = None
    num_dropped_tokens: int = 0  # whose KV a budget policy gave up on the way

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds on the engine's clock. TTFT is first_token - arrival, TPOT excludes the first token."""

    arrival: float
    first_token: float | None = None
    last_token: float | None = None

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    def tpot(self, num_tokens: int) -> float | None:
        if self.first_token is None or self.last_token is None or num_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (num_tokens - 1)


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[PositionLogprobs | None] | None = None  # None first: nothing predicts the first token
    num_cached_tokens: int = 0
    cache: CacheReport | None = None  # how the KV cache served the prompt, from the first token on

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)
