"""The scheduler: which tokens of which requests the next step computes, and what a step's result means for them.

There are no phases: a request is its known tokens minus the computed ones, and a step hands out token counts under a
budget; prompts in chunks, prefix hits, decoding and resumption are one case. Running requests come first, those with a
single pending token (decodes) before the rest, so that a long prompt never delays them; then waiting ones are admitted
in the order of the discipline. When pages run out, the discipline names the running request that gives up its pages and
is recomputed later; whoever is left alone advances, and the constructor makes sure that it fits. Knows neither tensors
nor text; EngineCore calls it.
"""

from __future__ import annotations

from itertools import count as counter

from tokenmill.engine.adapters.residency import AdapterSlots, RunningQueue
from tokenmill.engine.draft_slots import DraftSlots
from tokenmill.engine.kv.handles import Reservation, wants_prompt_logprobs
from tokenmill.engine.kv.manager import KVManager
from tokenmill.engine.kv.usage import check_fit
from tokenmill.engine.order.base import Discipline
from tokenmill.engine.order.queue import Key
from tokenmill.engine.pace import StepPace
from tokenmill.engine.siblings import make_sibling, using_adapter
from tokenmill.engine.stats import EngineStats
from tokenmill.engine.step_shares import StepShares
from tokenmill.engine.waiting_line import WaitingLine
from tokenmill.types import Request, ScheduledTokens, StepPlan, StepResult, TokenEvent, TokenLogprobs

_MIN_SHARED_TOKENS = 256  # a prefix that another request computes in this step is waited for from this length on
_LOAD_WAIT = 0.005  # seconds for a load from a tier, where there is nothing else to do; messages wait no longer


class Scheduler:
    """Waiting requests hold no pages; running ones do. `update` must follow each `schedule` with its plan."""

    def __init__(
        self,
        kv: KVManager,
        discipline: Discipline,
        max_batch_tokens: int,
        max_running: int,
        context_length: int,
        ahead: int = 0,
        max_drafts: int = 0,
        adapters: AdapterSlots | None = None,
        grammar_drafts: int = 0,
        pace: StepPace | None = None,
    ) -> None:
        """`ahead`: tokens beyond the scheduled ones to hold slots for, while there are pages: a runner that starts the
        next step before it is asked to needs them. `max_drafts`, `grammar_drafts`: as in DraftSlots. `pace`: keeps the
        steps of running sequences short."""
        assert min(max_batch_tokens, max_running) > 0
        check_fit(kv.layout, kv.num_pages, context_length)
        self.kv = kv
        self.discipline = discipline
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        self.context_length = context_length
        self.stats = kv.stats
        self._ahead = ahead
        self.adapters = adapters or AdapterSlots()
        self._waiting = WaitingLine(kv, self.adapters)
        self._running = RunningQueue(self.adapters)
        self._slots = DraftSlots(max_drafts, grammar_drafts, context_length)
        self._siblings: dict[str, list[Request]] = {}  # by request id: those that are not finished
        self._prompt_logprobs: dict[Request, list[TokenLogprobs]] = {}  # until the first token event takes them along
        self._sequence = counter()
        self._rows: dict[Request, ScheduledTokens] = {}  # of the step being scheduled
        self._budget = 0  # tokens that the step being scheduled can still take
        self._shares = StepShares(discipline, pace)
        self._num_drafted: int | None = 0  # in the step being taken in; None: it was a run of steps
        self.in_flight: set[Request] = set()  # of steps under way (lanes.py): neither scheduled nor preempted
        self.max_decodes: int | None = None  # in a step; None: all

    # --- from the caller ---

    @property
    def has_work(self) -> bool:
        return bool(self._siblings)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def measure(self) -> EngineStats:
        """The statistics record, with the gauges of this moment."""
        self.stats.num_running = len(self._running)
        self.stats.num_waiting = len(self._waiting)
        self.adapters.measure(self._running, self._waiting)
        return self.kv.measure()

    @property
    def is_loading(self) -> bool:
        """Whether requests wait for pages of a tier, or for their adapter."""
        return self.kv.is_loading or self.adapters.is_loading

    def using(self, digest: bytes) -> list[Request]:
        """The sequences of a version of an adapter."""
        return using_adapter(self._siblings.values(), digest)

    def knows(self, request_id: str) -> bool:
        return request_id in self._siblings

    def add(self, request: Request) -> None:
        """Queue a request. A prompt that fills the context gets one token, which is never computed."""
        assert 0 < request.num_tokens <= self.context_length, "prompt does not fit the context"
        assert request.request_id not in self._siblings, f"request id {request.request_id!r} is in use"
        self._siblings[request.request_id] = [request]
        self.kv.sources.announce(request)
        self._waiting.add(request, self._key(request))

    def cancel(self, request_id: str, index: int | None = None) -> bool:
        """Forget a request and its siblings, or only the one at `index`, at any moment; their pages are free at once.
        False: not known."""
        siblings = self._siblings.pop(request_id, [])
        cancelled = [request for request in siblings if index is None or request.index == index]
        for request in cancelled:
            siblings.remove(request)
            self._remove(request)
        if siblings:
            self._siblings[request_id] = siblings
        return bool(cancelled)

    # --- one step ---

    def schedule(self, run: int = 1) -> StepPlan:
        """The plan of the next step. Empty only if nothing is to be done, or all waits for a tier. `run`: tokens of a
        sequence that the caller takes at once; without drafts the runner may then compute that many in sequence."""
        self._rows = {}
        self._budget = self.max_batch_tokens
        self.adapters.begin_step()
        preemptions = self.stats.num_preemptions
        decodes, prompts = self._sort_running()
        for request in self._shares.begin(decodes, prompts, self._waiting):
            if self._budget > 0 and request in self._running and not self._shares.gives_way(request):
                self._continue(request, 1)
        crowded = self.stats.num_preemptions > preemptions
        self._divide(prompts)
        for request in prompts:
            if not crowded:
                self._admit(ahead_of=request)
            limit = self._shares.limit(request, self._budget, request.num_computed)
            if limit > 0 and request in self._running:
                before = self.stats.num_preemptions
                self._continue(request, min(request.num_tokens - request.num_computed, limit))
                crowded = crowded or self.stats.num_preemptions > before
        if not crowded:
            self._admit()
        if self._shares.leaves_rest:
            self._spend_rest()
        if not crowded:
            self._slots.hold(self.kv, self._rows, self._shares.paced_drafts(self._budget), run)
        return StepPlan(list(self._rows.values()), self.kv.take_copies(), run, self.kv.take_state_copies())

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take in what the step computed. Rows of requests that were cancelled meanwhile are ignored."""
        events = []
        rows = zip(plan.scheduled, result.token_ids, result.logprobs, result.prompt_logprobs, strict=True)
        for number, (row, token_id, logprobs, prompt_logprobs) in enumerate(rows):
            request = row.request
            if request not in self._running:
                continue
            accepted = result.accepted.get(number, [])
            self.stats.count_drafts(result.num_drafted.get(number, 0), len(accepted))
            request.token_ids += accepted
            request.num_computed = row.start + row.count + len(accepted)
            self.discipline.charge(request, row.count + len(accepted))
            self.kv.commit(request)
            if prompt_logprobs and wants_prompt_logprobs(request):
                self._prompt_logprobs.setdefault(request, []).extend(prompt_logprobs)
            if token_id is not None:
                events.append(self._advance(request, token_id, logprobs))
                if accepted:
                    events[-1].token_ids[:0] = accepted
                    events[-1].logprobs[:0] = result.accepted_logprobs.get(number, [])
                events[-1].embedding = result.embeddings.get(number, [])
            elif row.samples:
                events.append(self._give_up(request))
        self.stats.saved_seconds += result.saved_seconds
        self._num_drafted = sum(result.num_drafted.values()) if result.num_drafted or not result.accepted else None
        return events

    def record_step(self, plan: StepPlan, events: list[TokenEvent], seconds: float) -> None:
        """A step is over; `seconds` is what the runner took."""
        self._shares.record_step(plan, self._num_drafted, seconds)
        self.kv.record_step(plan, seconds)
        self.measure().record_step(plan, events, seconds)

    # --- handing out tokens ---

    def _sort_running(self) -> tuple[list[Request], list[Request]]:
        """(those with a single pending token, those with more), in order."""
        decodes: list[Request] = []
        prompts: list[Request] = []
        for request in self._running.snapshot():
            pending = len(request.token_ids) - request.num_computed
            if pending and request not in self.in_flight:
                (prompts if pending > 1 else decodes).append(request)
        return decodes[: self.max_decodes], prompts

    def _continue(self, request: Request, wanted: int) -> None:
        """Schedule up to `wanted` tokens of a running request; make room by preempting if not even one fits."""
        while not (slots := self.kv.reserve(request, wanted + self._ahead)):
            victim = self.discipline.victim(self._running)
            if victim in self.in_flight:
                return
            self._preempt(victim)
            if victim is request:
                return
        self._plan(request, min(wanted, slots.num_tokens), slots)

    def _admit(self, ahead_of: Request | None = None) -> None:
        """Start waiting requests in the discipline's order while budget, slots and pages last. None overtakes, but
        those whose pages or adapter are on their way, and those of tenants that have had their share of the step, are
        passed over and keep their place. With `ahead_of`, only those that may preempt that running request."""
        self._admit_in_order(ahead_of)
        self._waiting.bring_back()
        if ahead_of is None:
            self._waiting.look_ahead()

    def _admit_in_order(self, ahead_of: Request | None) -> None:
        while self._waiting.has_candidates and self._has_room:
            request = self.discipline.next(self._waiting)
            if ahead_of is not None and not self.discipline.outranks(request, ahead_of):
                return
            if not self._shares.allows(request):
                self._waiting.set_aside(self._shares.barred(self._waiting))
                continue
            # With nothing else to do, wait a moment for the first in the queue.
            idle = not self._rows and not len(self._running) and self._waiting.is_whole
            if not self._waiting.can_start(request, _LOAD_WAIT if idle else 0.0):
                continue
            if self._is_computed_now(request):
                return
            while not self._start(request):
                victim = self._victim_for(request)
                if victim is None:
                    return
                self._preempt(victim)

    @property
    def _has_room(self) -> bool:
        return self._budget > 0 and self._shares.has_room

    def _is_computed_now(self, request: Request) -> bool:
        """Whether this step computes much of the request's prefix for another one: a step later the cache has it."""
        for other, row in self._rows.items():
            end = row.start + _MIN_SHARED_TOKENS
            same_cache = row.count >= _MIN_SHARED_TOKENS and other.cache_name == request.cache_name
            if same_cache and other.token_ids[:end] == request.token_ids[:end]:
                return self.kv.match(request).max_tokens > 0
        return False

    def _start(self, request: Request) -> bool:
        """Admit the head of the queue. Unless alone, all its known tokens must fit: it would be preempted half way."""
        if len(self._running) >= self.max_running:
            return False
        match = self.kv.match(request)
        if not match.fits:
            return False
        limit = max(1, self._shares.limit(request, self._budget, match.num_tokens))
        slots = self.kv.reserve(request, min(request.num_tokens - match.num_tokens, limit), match)
        if not slots:
            return False
        request.num_computed = match.num_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = match.num_tokens
        self._running.add(request, self._waiting.remove(request))
        self.discipline.started(request)
        self._plan(request, slots.num_tokens, slots)
        return True

    def _victim_for(self, request: Request) -> Request | None:
        """The first running request to preempt if that lets `request` start. None is preempted for nothing (but for
        pages that they share: those count once for each holder)."""
        victims = self.discipline.preemptible(request, self._running)
        if not victims or self.in_flight:
            return None
        enough = len(victims) == len(self._running) or self.kv.match(request, without=victims).fits
        return victims[0] if enough else None

    def _divide(self, prompts: list[Request]) -> None:
        """Divide what is left of the step among the tenants whose prompts want it."""
        wanting = [*prompts, self.discipline.next(self._waiting)] if len(self._waiting) else prompts
        self._shares.divide_prompts(wanting, self._budget)

    def _spend_rest(self) -> None:
        """Prompts take, in order, what others left of their shares."""
        for request in self._running.snapshot():
            pending = request.num_tokens - request.num_computed
            row, free = self._rows.get(request), request in self._running and request not in self.in_flight
            if self._budget > 0 and free and pending > (row.count if row else 1):
                before = row.count if row else 0
                more = self._shares.paced(min(pending - before, self._budget), request.num_computed + before)
                if more > 0:
                    self._budget += before
                    self._continue(request, before + more)

    def _plan(self, request: Request, granted: int, slots: Reservation) -> None:
        start = request.num_computed
        samples = start + granted == len(request.token_ids)
        row = ScheduledTokens(request, start, granted, slots.block_tables, samples, slots.num_dropped)
        row.state_slot, row.adapter_slot = slots.state_slot, self.adapters.slot(request)
        self._rows[request] = row
        self._budget -= granted
        self._shares.take(request, granted)

    def _preempt(self, request: Request) -> None:
        """Back to the queue, without pages; its row in this step is withdrawn."""
        row = self._rows.pop(request, None)
        if row is not None:
            self._budget += row.count
        self._waiting.add(request, self._running.remove(request))
        self._shares.forget(request)
        self.discipline.stopped(request)
        self.kv.release(request)
        self._prompt_logprobs.pop(request, None)
        request.num_computed = 0
        request.num_preemptions += 1
        self.stats.num_preemptions += 1

    # --- the life of a request ---

    def _advance(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> TokenEvent:
        """Append a sampled token; fork after the first one; finish if it was the last."""
        event = TokenEvent(
            request.request_id,
            request.index,
            [token_id],
            [] if logprobs is None else [logprobs],
            self._prompt_logprobs.pop(request, []),
            request.num_cached_tokens,
        )
        if not request.num_output_tokens:
            event.report(request)
        request.token_ids.append(token_id)
        if request.params.n > 1 and not request.forked:
            self._fork(request)
        if token_id in request.stop_ids:
            event.finish_reason = "stop"
            event.stop_reason = token_id if token_id in request.params.stop_token_ids else None
        elif request.num_output_tokens >= request.params.max_tokens or request.num_tokens >= self.context_length:
            event.finish_reason = "length"
        else:
            return event
        event.report(request)
        self.cancel(request.request_id, request.index)
        return event

    def _give_up(self, request: Request) -> TokenEvent:
        """No token was possible: the sequence ends where it is. Its siblings are on their own."""
        if request.params.n > 1 and not request.forked:
            self._fork(request)
        event = TokenEvent(
            request.request_id,
            request.index,
            prompt_logprobs=self._prompt_logprobs.pop(request, []),
            num_cached_tokens=request.num_cached_tokens,
            finish_reason="error",
        )
        event.report(request)
        self.cancel(request.request_id, request.index)
        return event

    def _fork(self, parent: Request) -> None:
        """Make the siblings 1 .. n-1 of a request whose prompt is computed.

        Each recomputes the last prompt token only, on pages shared with the parent, and samples for itself. Those for
        which there is no slot, or no copy of recurrent states, wait like any request, without pages.
        """
        parent.forked = True
        for index in range(1, parent.params.n):
            child = make_sibling(parent, index)
            self._siblings[parent.request_id].append(child)
            child.num_computed = child.num_tokens - 1
            if len(self._running) < self.max_running and self.kv.fork(parent, child):
                self._running.add(child, self._key(child))
                self.discipline.started(child)
            else:
                child.num_computed = 0
                self._waiting.add(child, self._key(child))

    def _remove(self, request: Request) -> None:
        if request in self._running:
            self._running.remove(request)
            self.discipline.stopped(request)
        else:
            self._waiting.remove(request)
        self._shares.forget(request)
        self.kv.release(request)
        self.kv.sources.forget(request)
        self._prompt_logprobs.pop(request, None)
        self.discipline.leave(request)

    def _key(self, request: Request) -> Key:
        return (*self.discipline.key(request), request.index, next(self._sequence))
