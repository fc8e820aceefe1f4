"""Admission: which requests may enter the engine's queue, and when to retry if not.

Bounds the requests and tokens that wait, keeps each key within its quota, and refuses what cannot meet its deadline by
the engine's own measured speed. Pure bookkeeping, the caller passes the time; knows nothing of HTTP or processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.engine.stats import EngineStats
from tokenmill.serve.errors import ApiError
from tokenmill.serve.keys import Client

_SMOOTHING = 0.1
_PROMPT_STEP = 32  # tokens from which a step is taken to be mostly prompts


class Pace:
    """Measured speed of the engine, from its steps and from finished requests; None before the first measurement."""

    def __init__(self) -> None:
        self.prompt_rate: float | None = None  # tokens per second
        self.service_seconds: float | None = None  # from first to last token of a request

    def record_step(self, stats: EngineStats) -> None:
        if stats.step_tokens >= _PROMPT_STEP and stats.step_seconds > 0:
            self.prompt_rate = _blend(self.prompt_rate, stats.step_tokens / stats.step_seconds)

    def record_service(self, seconds: float) -> None:
        self.service_seconds = _blend(self.service_seconds, seconds)

    def predict_ttft(self, tokens_before: int, own_tokens: int, num_ahead: int, num_slots: int) -> float:
        """Seconds to the first token: all prompts ahead, and requests that must finish first if every slot is taken."""
        prefill = (tokens_before + own_tokens) / self.prompt_rate if self.prompt_rate else 0.0
        num_to_finish = max(0, num_ahead + 1 - num_slots)
        waiting = num_to_finish * (self.service_seconds or 0.0) / num_slots
        return prefill + waiting


@dataclass(slots=True)
class Ticket:
    """What an admitted HTTP request holds until `release`."""

    client: Client
    num_sequences: int
    waiting_requests: int  # prompts without a first token
    waiting_tokens: int


class Admission:
    def __init__(self, num_slots: int, max_queued_requests: int, max_queued_tokens: int, pace: Pace) -> None:
        self.pace = pace
        self._num_slots = num_slots
        self._max_requests = max_queued_requests
        self._max_tokens = max_queued_tokens
        self.num_active = 0  # sequences admitted and not released
        self.num_waiting = 0  # prompts without a first token
        self.waiting_tokens = 0
        self.draining = False

    def check_client(self, client: Client, now: float) -> None:
        """Raise ApiError for what can be rejected before the prompt is tokenized."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after=5)
        if client.max_parallel and client.num_active >= client.max_parallel:
            raise self._refusal(f"key '{client.name}' has {client.num_active} requests in flight", "parallel_limit", 1)
        for bucket, what, amount in ((client.requests, "request", 1.0), (client.tokens, "token", 1.0)):
            wait = bucket.wait(amount, now) if bucket is not None else 0.0
            if wait > 0:
                raise self._refusal(f"the {what} quota of key '{client.name}' is used up", f"{what}_quota", wait)
        if self.num_waiting >= self._num_slots + self._max_requests:
            raise self._refusal(f"{self.num_waiting} requests are already waiting", "queue_full", self._clearing_time())

    def admit(self, client: Client, lengths: list[int], num_answers: int, deadline: float | None, now: float) -> Ticket:
        """Admit the prompts of one HTTP request, or raise ApiError with the time to retry. `deadline`: seconds to the
        first token."""
        self.check_client(client, now)
        tokens = sum(lengths)
        queued = self.num_waiting + len(lengths)
        if queued > self._num_slots + self._max_requests:
            raise self._refusal(f"{self.num_waiting} requests are already waiting", "queue_full", self._clearing_time())
        if self.num_waiting and self.waiting_tokens + tokens > self._max_tokens:
            raise self._refusal(
                f"{self.waiting_tokens} tokens are already waiting", "queue_full", self._clearing_time()
            )
        if deadline is not None:
            predicted = self.predict(tokens)
            if predicted > deadline:
                late = f"the first token is expected in {predicted:.2f} s, after the deadline of {deadline:.2f} s"
                raise self._refusal(late, "deadline", predicted - deadline)
        if client.requests is not None:
            client.requests.take(1.0, now)
        if client.tokens is not None:
            client.tokens.take(float(tokens), now)
        ticket = Ticket(client, len(lengths) * num_answers, len(lengths), tokens)
        client.num_active += 1
        self.num_active += ticket.num_sequences
        self.num_waiting += len(lengths)
        self.waiting_tokens += tokens
        return ticket

    def predict(self, num_tokens: int) -> float:
        """Seconds to the first token of a prompt that would arrive now."""
        return self.pace.predict_ttft(self.waiting_tokens, num_tokens, self.num_active, self._num_slots)

    def started(self, ticket: Ticket, num_tokens: int) -> None:
        """One of the ticket's prompts has its first token."""
        ticket.waiting_requests -= 1
        ticket.waiting_tokens -= num_tokens
        self.num_waiting -= 1
        self.waiting_tokens -= num_tokens

    def release(self, ticket: Ticket, output_tokens: int, now: float) -> None:
        """The request has ended: prompts that never started leave the queue, generated tokens are charged to the
        quota."""
        self.num_waiting -= ticket.waiting_requests
        self.waiting_tokens -= ticket.waiting_tokens
        self.num_active -= ticket.num_sequences
        ticket.client.num_active -= 1
        if ticket.client.tokens is not None:
            ticket.client.tokens.take(float(output_tokens), now)

    def _clearing_time(self) -> float:
        """Seconds until about a tenth of the queue has been served."""
        return max(1.0, self.predict(0) / 10)

    @staticmethod
    def _refusal(message: str, code: str, wait: float) -> ApiError:
        return ApiError(429, message, code=code, retry_after=min(wait, 3600.0))


def _blend(old: float | None, new: float) -> float:
    return new if old is None else (1 - _SMOOTHING) * old + _SMOOTHING * new
