"""Admission: which requests may enter the engine's queue, and when to retry if not.

Bounds the requests and tokens that wait, for all keys and for each, keeps each key within its quota, and refuses what
cannot meet its deadline by the engine's own measured speed. Pure bookkeeping, the caller passes the time; knows nothing
of HTTP or processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.engine.stats import PROMPT_STEP_TOKENS, EngineStats
from tokenmill.serve.errors import ApiError
from tokenmill.serve.tenants.keys import Client

_SMOOTHING = 0.1


class Pace:
    """Measured speed of the engine, from its steps and from finished requests; None before the first measurement."""

    def __init__(self) -> None:
        self.prompt_rate: float | None = None  # tokens per second
        self.service_seconds: float | None = None  # from first to last token of a request

    def record_step(self, stats: EngineStats) -> None:
        if stats.step_tokens >= PROMPT_STEP_TOKENS and stats.step_seconds > 0:
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
    reserved_tokens: int  # of output, charged in advance
    yields: bool = False  # to interactive requests: it is in the batch lane


class Admission:
    """The queue bounds hold for all keys together, and `queue_share` of them for each key. When the queue is full, a
    key that has less than its fair share of it is admitted all the same, up to twice the bounds: no key can keep
    others out."""

    def __init__(self, num_slots: int, max_queued_requests: int, max_queued_tokens: int, pace: Pace) -> None:
        self.pace = pace
        self.num_slots = num_slots
        self._max_waiting = num_slots + max_queued_requests
        self._max_tokens = max_queued_tokens
        self._waiting_clients: set[Client] = set()
        self.num_active = 0  # sequences admitted and not released
        self.num_waiting = 0  # prompts without a first token
        self.waiting_tokens = 0
        self.num_yielding = self.yielding_tokens = 0  # what of `num_active` and `waiting_tokens` yields
        self.draining = False

    def check_client(self, client: Client, now: float, queue: bool = True) -> None:
        """Raise ApiError for what can be rejected before the prompt is tokenized; `queue`: by the queue too."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after=5)
        if client.withdrawn:
            raise key_withdrawn()
        if client.max_parallel and client.num_active >= client.max_parallel:
            raise _refusal(f"key '{client.name}' has {client.num_active} requests in flight", "parallel_limit", 1)
        self.check_sequences(client, 1)
        self._check_quotas(client, 1, now)
        if queue:
            self._check_queue(client, 1, 0)

    def admit(
        self,
        client: Client,
        lengths: list[int],
        num_answers: int,
        deadline: float | None,
        now: float,
        max_output: int = 0,
        yields: bool = False,
    ) -> Ticket:
        """Admit the prompts of one HTTP request, or raise ApiError with the time to retry. `deadline`: seconds to the
        first token; `max_output`: tokens that all its sequences may generate, charged to the quota until `release`."""
        self.check_client(client, now)
        tokens = sum(lengths)
        reserved = max_output if client.tokens else 0
        ticket = Ticket(client, len(lengths) * num_answers, len(lengths), tokens, reserved, yields)
        self.check_sequences(client, ticket.num_sequences)
        self._check_quotas(client, tokens + max_output, now)
        self._check_queue(client, len(lengths), tokens)
        if deadline is not None:
            predicted = self.predict(tokens, yields)
            if predicted > deadline:
                late = f"the first token is expected in {predicted:.2f} s, after the deadline of {deadline:.2f} s"
                raise _refusal(late, "deadline", predicted - deadline)
        if client.requests is not None:
            client.requests.take(1.0, now)
        if client.tokens is not None:
            client.tokens.take(float(tokens + max_output), now)
        client.num_active += 1
        client.num_sequences += ticket.num_sequences
        self._change_active(ticket, ticket.num_sequences)
        self._change_waiting(ticket, len(lengths), tokens)
        return ticket

    def predict(self, num_tokens: int, yields: bool = False) -> float:
        """Seconds to the first token of a prompt that would arrive now. Unless it yields itself, what yields is not in
        its way."""
        waiting = self.waiting_tokens - (0 if yields else self.yielding_tokens)
        ahead = self.num_active - (0 if yields else self.num_yielding)
        return self.pace.predict_ttft(waiting, num_tokens, ahead, self.num_slots)

    @property
    def capacity(self) -> int:
        """Prompts that one request may have at most: more could never be admitted."""
        return self._max_waiting

    @property
    def has_idle_slot(self) -> bool:
        """Whether one more sequence would start at once."""
        return not self.draining and self.num_active < self.num_slots

    def started(self, ticket: Ticket, num_tokens: int) -> None:
        """One of the ticket's prompts has its first token."""
        ticket.waiting_requests -= 1
        ticket.waiting_tokens -= num_tokens
        self._change_waiting(ticket, -1, -num_tokens)

    def release(self, ticket: Ticket, output_tokens: int, now: float) -> None:
        """The request has ended: prompts that never started leave the queue, and the quota is charged for what was
        generated instead of what was reserved."""
        client = ticket.client
        self._change_waiting(ticket, -ticket.waiting_requests, -ticket.waiting_tokens)
        self._change_active(ticket, -ticket.num_sequences)
        client.num_sequences -= ticket.num_sequences
        client.num_active -= 1
        if client.tokens is not None:
            client.tokens.take(float(output_tokens - ticket.reserved_tokens), now)

    def _change_active(self, ticket: Ticket, num_sequences: int) -> None:
        self.num_active += num_sequences
        self.num_yielding += num_sequences if ticket.yields else 0

    def _change_waiting(self, ticket: Ticket, num_requests: int, num_tokens: int) -> None:
        client = ticket.client
        self.num_waiting += num_requests
        self.yielding_tokens += num_tokens if ticket.yields else 0
        self.waiting_tokens += num_tokens
        client.num_waiting += num_requests
        client.waiting_tokens += num_tokens
        (self._waiting_clients.add if client.num_waiting else self._waiting_clients.discard)(client)

    def check_sequences(self, client: Client, number: int) -> None:
        """Raise ApiError if the key may not have so many sequences at once, or not so many more now."""
        limit = client.max_sequences
        if limit and number > limit:
            raise ApiError(
                400, f"prompts x n is {number}, key '{client.name}' may have {limit} sequences", code="sequence_limit"
            )
        if limit and client.num_sequences + number > limit:
            raise _refusal(f"key '{client.name}' has {client.num_sequences} sequences in flight", "sequence_limit", 1)

    def _check_quotas(self, client: Client, tokens: int, now: float) -> None:
        for bucket, what, amount in ((client.requests, "request", 1), (client.tokens, "token", tokens)):
            wait = bucket.wait(float(amount), now) if bucket is not None else 0.0
            if wait > 0:
                raise _refusal(f"the {what} quota of key '{client.name}' is used up", f"{what}_quota", wait)

    def _check_queue(self, client: Client, num_requests: int, num_tokens: int) -> None:
        """What it says of a full queue does not tell how many requests others have."""
        share = client.queue_share
        if client.num_waiting and share < 1 and not self._has_share(client, num_requests, num_tokens, share):
            full = f"key '{client.name}' has {client.num_waiting} requests waiting, which is its share of the queue"
            raise _refusal(full, "queue_share", self._clearing_time())
        if self._has_room(num_requests, num_tokens, 1):
            return
        fair_share = client.weight / sum(each.weight for each in {*self._waiting_clients, client})
        below = self._has_share(client, num_requests, num_tokens, fair_share)
        if below and self._has_room(num_requests, 0, 2):
            return
        raise _refusal("the queue is full", "queue_full", self._clearing_time())

    def _has_room(self, num_requests: int, num_tokens: int, factor: int) -> bool:
        """Whether these fit the bounds times `factor`. One long prompt may exceed the token bound if nothing waits."""
        tokens_fit = not self.num_waiting or self.waiting_tokens + num_tokens <= factor * self._max_tokens
        return tokens_fit and self.num_waiting + num_requests <= factor * self._max_waiting

    def _has_share(self, client: Client, num_requests: int, num_tokens: int, share: float) -> bool:
        """Whether the key stays within a share of the queue with these. It may always have one prompt there."""
        requests, tokens = client.num_waiting + num_requests, client.waiting_tokens + num_tokens
        tokens_fit = not client.num_waiting or tokens <= share * self._max_tokens
        return requests <= max(1.0, share * self._max_waiting) and tokens_fit

    def _clearing_time(self) -> float:
        """Seconds until about a tenth of the queue has been served."""
        return max(1.0, self.predict(0) / 10)


def key_withdrawn() -> ApiError:
    return ApiError(401, "the API key was withdrawn", code="invalid_api_key")


def check_grammar_quota(client: Client, now: float) -> None:
    """Raise ApiError if the key has used up its time for compiling grammars."""
    wait = client.grammar_seconds.wait(0.001, now) if client.grammar_seconds is not None else 0.0
    if wait > 0:
        raise _refusal(f"the grammar quota of key '{client.name}' is used up", "grammar_quota", wait)


def _refusal(message: str, code: str, wait: float) -> ApiError:
    return ApiError(429, message, code=code, retry_after=min(wait, 3600.0))


def _blend(old: float | None, new: float) -> float:
    return new if old is None else (1 - _SMOOTHING) * old + _SMOOTHING * new
