"""Compiles grammars in threads of its own, with a time limit, so that a bad grammar delays no other request.

`submit` returns a job at once; `compile` waits for it. Tenants take turns; a job whose requests are all gone is not
compiled. Compiled grammars are cached by content. A job that exceeds its time is abandoned: its thread ends by itself
(the library has limits of its own) and another thread takes over. Called by the engine loop when a request arrives,
never by the sampler. Grammars from outside were checked in a process of their own before (check.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.errors import UserError
from tokenmill.grammar.kept_masks import GrammarMasks, KeptMasks
from tokenmill.grammar.round_robin import RoundRobin
from tokenmill.grammar.source import check_limits, grammar_text, refusal
from tokenmill.grammar.states import states_of
from tokenmill.grammar.vocabulary import Bits, TokenBytes, build_vocabulary, punctuation_of
from tokenmill.hardware.priority import lower_thread_priority
from tokenmill.types import StructuredSpec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_MAX_CACHED = 32
_MAX_LANES = 8  # of a grammar
_MAX_FURTHER_LANES = 2 * _MAX_CACHED  # of all that are cached: a lane takes as much memory as the grammar
_MAX_LANE_SECONDS = 0.1  # a grammar that took longer to compile has one lane: others wait for the compiler
# Processor time that computing the masks of one request may take, so that it delays no other in its batch: MASK_SECONDS
# for each token, and MASK_BURST_SECONDS once.
MASK_SECONDS = 0.002
MASK_BURST_SECONDS = 0.03
_MAX_ABANDONED = 4  # threads that may still be busy with abandoned grammars
_POLL_SECONDS = 0.02
# The library recurses into a grammar. The longest one that is accepted fits; only touched pages take memory.
_STACK_BYTES = 128 << 20


class CompiledGrammar:
    """A grammar over one model's tokens. Shared by all requests that use it; each has a matcher of its own.

    Matchers of one lane share what the library finds out about the grammar, under a lock: each further lane is the
    grammar compiled again.
    """

    def __init__(
        self, prototype: LLMatcher, vocabulary: LLTokenizer, key: int = 0, masks: GrammarMasks | None = None
    ) -> None:
        self.key = key
        self.masks = masks
        self._prototypes = [prototype]
        self._vocabulary = vocabulary
        self.mask_seconds = 0.0
        self.want_lane: Callable[[], None] = lambda: None
        self.vocab_size: int = vocabulary.vocab_size  # of the tokenizer; a model may have more logits
        self.punctuation: Bits | None = None  # tokens of brackets, quotes and blanks alone; None: not looked for

    @property
    def num_lanes(self) -> int:
        return len(self._prototypes)

    def matcher(self, lane: int = 0) -> LLMatcher:
        return self._prototypes[lane].deep_copy()

    def add_lane(self, other: CompiledGrammar) -> None:
        """`other`: the same grammar, compiled again."""
        self._prototypes += other._prototypes

    def token_bytes(self, token_id: int) -> bytes:
        data: bytes = self._vocabulary.decode_bytes([token_id])
        return data


class GrammarJob:
    """One grammar being compiled."""

    def __init__(self, spec: StructuredSpec, seconds: float) -> None:
        self.spec = spec
        self.tenants: set[str] = set()  # in whose queues it is
        self.num_waiting = 0  # requests
        self._seconds = seconds
        self._ended = threading.Event()
        self._began: float | None = None
        self._grammar: CompiledGrammar | None = None
        self._error: Exception | None = None

    @property
    def began(self) -> bool:
        return self._began is not None

    @property
    def expired(self) -> bool:
        """Only the time of its own work counts, not the time in the queue."""
        began = self._began
        return not self._ended.is_set() and began is not None and time.monotonic() - began > self._seconds

    @property
    def done(self) -> bool:
        return self._ended.is_set() or self.expired

    def result(self) -> CompiledGrammar:
        """The grammar; only once the job is done. Raises UserError."""
        if not self._ended.is_set():
            raise UserError(
                f"the {self.spec.kind} took more than {self._seconds:g} s to compile", "make it smaller or simpler"
            )
        if self._error is not None:
            raise self._error
        assert self._grammar is not None
        return self._grammar

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, at most `seconds`."""
        self._ended.wait(seconds)

    # --- the compiler's side ---

    def begin(self) -> None:
        self._began = time.monotonic()

    def end(self, result: CompiledGrammar | Exception) -> None:
        if isinstance(result, CompiledGrammar):
            self._grammar = result
        else:
            self._error = result
        self._ended.set()


class GrammarCompiler:
    def __init__(self, tokenizer: TokenBytes, eos_ids: Sequence[int], seconds: float = 2.0) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = tuple(eos_ids)
        self._seconds = seconds
        self._vocabulary: LLTokenizer | None = None
        self._punctuation: Bits | None = None
        self._ready: OrderedDict[StructuredSpec, GrammarJob] = OrderedDict()
        self._current: dict[StructuredSpec, GrammarJob] = {}  # queued or being compiled
        self._queue: RoundRobin[GrammarJob] = RoundRobin()
        self._lock = threading.Lock()  # around the tables and the queue
        self._queued = threading.Condition(self._lock)
        self._building = threading.Lock()  # around the vocabulary
        self._masks: KeptMasks | None = None
        self._num_workers = 0
        self._abandoned: set[GrammarJob] = set()
        self._lacking: OrderedDict[StructuredSpec, None] = OrderedDict()  # want one more lane

    def prepare(self) -> None:
        """Build the vocabulary in the background, so that the first grammar does not wait for it."""
        self.replace_stuck_worker()

    def submit(self, spec: StructuredSpec, tenant: str = "") -> GrammarJob:
        self.replace_stuck_worker()
        with self._lock:
            if spec in self._ready:
                self._ready.move_to_end(spec)
                return self._ready[spec]
            job = self._current.get(spec) or GrammarJob(spec, self._seconds)
            if spec not in self._current and len(self._abandoned) > _MAX_ABANDONED:
                job.end(UserError("too many slow grammars are being compiled", "try again in some seconds"))
                return job
            self._current[spec] = job
            job.num_waiting += 1
            if not job.began and tenant not in job.tenants:
                job.tenants.add(tenant)
                self._queue.add(tenant, job)
                self._queued.notify()
        return job

    def withdraw(self, job: GrammarJob) -> None:
        """A request does not wait for the job any more; after the last one it leaves the queue."""
        with self._lock:
            job.num_waiting -= 1
            if job.num_waiting > 0 or job.began or self._current.get(job.spec) is not job:
                return
            del self._current[job.spec]
            for tenant in job.tenants:
                self._queue.remove(tenant, job)

    def compile(self, spec: StructuredSpec) -> CompiledGrammar:
        """Wait for a grammar. Raises UserError if it cannot be used or takes too long."""
        job = self.submit(spec)
        while not job.done:
            job.wait(_POLL_SECONDS)
            self.replace_stuck_worker()
        return job.result()

    def replace_stuck_worker(self) -> None:
        """Start another thread for one whose job exceeded its time. Called regularly while jobs are pending."""
        with self._lock:
            for job in [current for current in self._current.values() if current.expired]:
                del self._current[job.spec]
                self._abandoned.add(job)
            self._ensure_worker()

    # --- worker threads ---

    def _ensure_worker(self) -> None:
        if self._num_workers <= len(self._abandoned):
            self._num_workers += 1
            before = threading.stack_size(_STACK_BYTES)
            try:
                # A daemon: an interpreter that ends does not wait for a grammar.
                threading.Thread(target=self._work, name="tokenmill-grammar", daemon=True).start()
            finally:
                threading.stack_size(before)

    def _work(self) -> None:
        lower_thread_priority()
        with contextlib.suppress(Exception):  # raised again for each job
            self._built_vocabulary()
        while True:
            job = self._next()
            if isinstance(job, StructuredSpec):
                with contextlib.suppress(Exception):  # one lane less, but this thread goes on
                    self._add_lane(job)
                continue
            try:
                result: CompiledGrammar | Exception = self._compiled(job.spec)
            except Exception as error:
                result = error
            if self._finish(job, result):
                return

    def _next(self) -> GrammarJob | StructuredSpec:
        """Wait for a job; its time runs from here. Where there is none, a grammar that wants one more lane."""
        with self._queued:
            while True:
                job = self._queue.take()
                if job is None and self._lacking:
                    return self._lacking.popitem(last=False)[0]
                if job is None:
                    self._queued.wait()
                elif not job.began:  # else another tenant's turn has come before
                    job.begin()
                    return job

    def _finish(self, job: GrammarJob, result: CompiledGrammar | Exception) -> bool:
        """Deliver the result; returns whether this thread is no longer needed, because it was replaced meanwhile."""
        with self._lock:
            replaced = job in self._abandoned
            self._abandoned.discard(job)
            if self._current.get(job.spec) is job:
                del self._current[job.spec]
            if isinstance(result, CompiledGrammar):
                self._ready[job.spec] = job
                while len(self._ready) > _MAX_CACHED:
                    self._ready.popitem(last=False)
            if replaced and self._num_workers > 1:
                self._num_workers -= 1
            else:
                replaced = False
            job.end(result)
        return replaced

    def _compiled(self, spec: StructuredSpec) -> CompiledGrammar:
        began = time.monotonic()
        vocabulary = self._built_vocabulary()
        grammar = compile_grammar(spec, vocabulary, self._masks)
        grammar.punctuation = self._punctuation
        if time.monotonic() - began < _MAX_LANE_SECONDS:
            grammar.want_lane = lambda: self._want_lane(spec)
        return grammar

    def _want_lane(self, spec: StructuredSpec) -> None:
        """Asked in every step of many rows: what cannot be had wakes nobody."""
        with self._queued:
            grammar = self._kept(spec)
            if grammar is None or grammar.num_lanes >= _MAX_LANES or spec in self._lacking:
                return
            if sum(job.result().num_lanes - 1 for job in self._ready.values()) < _MAX_FURTHER_LANES:
                self._lacking[spec] = None
                self._queued.notify()

    def _kept(self, spec: StructuredSpec) -> CompiledGrammar | None:
        job = self._ready.get(spec)
        return None if job is None else job.result()

    def _add_lane(self, spec: StructuredSpec) -> None:
        with self._lock:
            grammar = self._kept(spec)
        if grammar is not None and grammar.num_lanes < _MAX_LANES:
            grammar.add_lane(compile_grammar(spec, self._built_vocabulary()))

    def _built_vocabulary(self) -> LLTokenizer:
        with self._building:
            if self._vocabulary is None:
                self._vocabulary = build_vocabulary(self._tokenizer, self._eos_ids)
                self._masks = KeptMasks(self._vocabulary)
                self._punctuation = punctuation_of(self._tokenizer)
            return self._vocabulary


def compile_grammar(spec: StructuredSpec, vocabulary: LLTokenizer, kept: KeptMasks | None = None) -> CompiledGrammar:
    """In the calling thread. Raises UserError where the grammar cannot be used. `kept`: where masks are kept by state,
    if the grammar has such."""
    from llguidance import LLMatcher

    check_limits(spec)
    matcher = LLMatcher(vocabulary, grammar_text(spec), log_level=0, limits=_limits())
    if matcher.is_error():
        raise refusal(spec, matcher.get_error())
    # The first mask is the most expensive one; what it computes is shared by all copies.
    first = matcher.deep_copy()
    mask = first.compute_bitmask()
    if first.is_error() or not any(mask):
        raise refusal(spec, first.get_error() or "it allows no output at all")
    states = None if kept is None else states_of(spec)
    if kept is None or states is None:
        return CompiledGrammar(matcher, vocabulary, hash(spec))
    masks = GrammarMasks(states, kept)
    words = (vocabulary.vocab_size + 31) // 32  # the library may have one more
    masks.keep(masks.start, np.frombuffer(mask, dtype=np.int32)[:words])
    return CompiledGrammar(matcher, vocabulary, hash(spec), masks)


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    # Half of the library's defaults or less: hostile grammars were seen to take about 10 ms for a mask.
    return LLParserLimits(
        max_lexer_states=50_000,  # about 1.5 kB each, for each grammar
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=25_000,
        max_grammar_size=250_000,
        verbose_errors=False,
    )
