"""The engine process: reads messages, steps, writes what each step brought. No HTTP, no text, no tokenizer work.

Started by the server as `python -m tokenmill.engine.process` with an EngineSpec on standard input; it ends when it is
told to, or when that pipe closes because the server is gone. One thread steps and owns its sockets; a side thread sends
heartbeats, so that a stuck step is seen from outside. SIGUSR1 prints all stacks to standard error.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import asdict

import msgspec
import zmq

from tokenmill.config import EngineConfig
from tokenmill.engine import messages
from tokenmill.engine.build import EngineParts, build_engine
from tokenmill.engine.compiling import Compiling
from tokenmill.engine.kv.tier.stack import TierStack
from tokenmill.engine.messages import (
    Cancel,
    EngineSpec,
    Events,
    Failed,
    FromEngine,
    Heartbeat,
    Phase,
    Ping,
    Pong,
    Ready,
    Refused,
    Shutdown,
    Snapshot,
    Submit,
    TierSnapshot,
)
from tokenmill.errors import UserError
from tokenmill.log import configure, get_logger
from tokenmill.types import Request, SamplingParams

_log = get_logger(__name__)
_IDLE_POLL_MS = 1000
_SHORT_POLL_MS = 2  # while something is done beside the steps
_CLOSE_SECONDS = 1.5  # to write cached pages to the tiers; the server waits for two
_MAX_REASON = 500  # characters; the traceback is on standard error


class Pulse:
    """Sends a heartbeat every so often from its own thread, and ends the process when the server is gone."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], spec: EngineSpec) -> None:
        self.step_began = 0.0  # monotonic; 0: no step runs
        self.num_steps = 0
        self._context = context
        self._spec = spec
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def _beat(self) -> None:
        socket = _connect(self._context, zmq.PUSH, self._spec.outbox)
        while True:
            began = self.step_began
            age = time.monotonic() - began if began else 0.0
            socket.send(messages.encode(Heartbeat(age, self.num_steps)))
            readable, _, _ = select.select([sys.stdin], [], [], self._spec.heartbeat_seconds)
            if readable and not os.read(sys.stdin.fileno(), 1):
                os._exit(0)  # the server has ended: nobody waits for an answer


class EngineProcess:
    def __init__(self, parts: EngineParts, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], pulse: Pulse) -> None:
        self._parts = parts
        self._core = parts.core
        self._compiling = Compiling(parts.grammars)
        self._inbox = inbox
        self._outbox = outbox
        self._pulse = pulse
        self._step_tokens = 0
        self._step_seconds = 0.0
        self._consistent = True
        self._saving = False  # there are pages that idle moments can write to the tiers
        self._preparing = True  # there are kinds of steps that idle moments can make fast
        self._closing = False

    def run(self) -> None:
        while not self._closing:
            busy = self._compiling or self._saving or self._preparing
            patience = _SHORT_POLL_MS if busy else _IDLE_POLL_MS
            handled = self._receive(0 if self._core.has_work else patience)
            self._take_compiled()
            if self._core.has_work:
                self._step()
            elif handled:
                self._check_pages()
                self._send(Events([], self._snapshot()))
            elif self._saving:
                self._saving = self._core.scheduler.kv.save()
                if not self._saving:
                    self._send(Events([], self._snapshot()))
            elif self._preparing:
                self._preparing = self._parts.runtime.runner.prepare()

    def _step(self) -> None:
        stats = self._core.stats
        computed, began = stats.num_tokens_computed, time.monotonic()
        self._pulse.step_began = began
        events = self._core.step()
        self._pulse.step_began = 0.0
        self._pulse.num_steps = stats.num_steps
        self._step_tokens = stats.num_tokens_computed - computed
        self._step_seconds = time.monotonic() - began
        self._saving = self._core.scheduler.kv.tiers is not None
        if not self._core.has_work:
            self._check_pages()
        self._send(Events(events, self._snapshot()))

    def _receive(self, timeout_ms: int) -> bool:
        """Take in all messages that wait; whether there were any. One that cannot be used is answered, no more."""
        handled = False
        while self._inbox.poll(0 if handled else timeout_ms):
            handled = True
            data = self._inbox.recv()
            try:
                message = messages.decode_to_engine(data)
            except (msgspec.DecodeError, UserError, RecursionError) as error:
                _log.warning("unusable message of %d bytes: %s", len(data), error)
                self._send(Refused("", str(error)))
                continue
            self._handle(message)
        return handled

    def _handle(self, message: messages.ToEngine) -> None:
        match message:
            case Submit():
                problem = self._problem(message)
                if problem:
                    self._send(Refused(message.request_id, problem))
                elif message.params.structured is not None:
                    self._compiling.add(message)
                else:
                    self._core.add(message.request())
            case Cancel(request_id=request_id, index=index):
                self._compiling.cancel(request_id)
                self._core.cancel(request_id, index)
            case Ping(number=number):
                self._send(Pong(number))
            case Shutdown():
                self._closing = True

    def _take_compiled(self) -> None:
        for outcome in self._compiling.take():
            if isinstance(outcome, Refused):
                self._send(outcome)
            else:
                self._core.add(outcome)

    def _problem(self, message: Submit) -> str | None:
        """Why the scheduler could not take this request; None if it can."""
        scheduler, vocab_size = self._core.scheduler, self._parts.description.vocab_size
        if not 0 < len(message.prompt_ids) <= scheduler.context_length:
            return f"the prompt has {len(message.prompt_ids)} tokens, the context holds {scheduler.context_length}"
        ids = (*message.prompt_ids, *message.stop_ids, *(message.params.logit_bias or ()))
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            return f"a token id is outside the vocabulary of {vocab_size}"
        if not 0 < message.weight < float("inf"):
            return f"weight {message.weight} is not a positive number"
        if scheduler.knows(message.request_id) or message.request_id in self._compiling:
            return f"request id '{message.request_id}' is in use"
        try:
            scheduler.kv.budgets.check(message.params)
        except UserError as error:
            return str(error)
        return None

    def _check_pages(self) -> None:
        try:
            self._core.scheduler.kv.check()
            self._consistent = True
        except AssertionError as error:
            self._consistent = False
            _log.error("KV pages are inconsistent: %s", error)

    def _snapshot(self) -> Snapshot:
        stats, scheduler = self._core.stats, self._core.scheduler
        kv = scheduler.kv
        return Snapshot(
            stats.num_steps,
            stats.num_tokens_computed,
            stats.num_tokens_sampled,
            scheduler.num_preemptions,
            kv.pool.num_evictions,
            kv.num_query_tokens,
            kv.num_hit_tokens,
            scheduler.num_running,
            scheduler.num_waiting,
            kv.num_pages,
            kv.num_pages - kv.pool.available,
            kv.pool.num_cached,
            self._step_tokens,
            self._step_seconds,
            self._consistent,
            num_pages_kept=kv.keeping.num_kept,
            num_promises_broken=kv.keeping.num_broken,
            num_pages_unwritten=kv.tiers.num_unwritten if kv.tiers is not None else 0,
            tiers=tier_snapshots(kv.tiers),
            num_drafts=scheduler.num_drafts,
            num_drafted=scheduler.num_drafted,
            num_accepted=scheduler.num_accepted,
            saved_seconds=scheduler.saved_seconds,
        )

    def _send(self, message: FromEngine) -> None:
        self._outbox.send(messages.encode(message))


def tier_snapshots(tiers: TierStack | None) -> list[TierSnapshot]:
    if tiers is None:
        return []
    return [TierSnapshot(name, **asdict(stats), read_bandwidth=speed) for name, stats, speed in tiers.stats()]


def describe(parts: EngineParts) -> Ready:
    types: Counter[str] = Counter()
    for weight in parts.runtime.model.weights.values():
        types[weight.type_name] += weight.out_features * weight.in_features
    description = parts.description
    return Ready(
        description.vocab_size,
        list(dict.fromkeys((*description.eos_ids, *parts.tokenizer.eos_ids))),
        asdict(parts.config),
        description.architecture,
        description.name,
        types.most_common(1)[0][0] if types else "",
        parts.runtime.model.weight_bytes,
        parts.load_seconds,
    )


def warm_up(parts: EngineParts) -> None:
    """Compute a few tokens, so that "ready" has seen tokens move and the first request finds everything in place."""
    length = min(16, parts.config.context - 4)
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    parts.core.add(Request("warm-up", [min(5, parts.description.vocab_size - 1)] * max(1, length), params))
    while parts.core.has_work:
        parts.core.step()
    parts.core.scheduler.kv.clear_cache()


def serve_engine(spec: EngineSpec) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    out_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # its own: ending it sends what is left
    outbox = _connect(out_context, zmq.PUSH, spec.outbox)
    inbox = _connect(context, zmq.PULL, spec.inbox)
    pulse = Pulse(context, spec)
    code = 0
    try:
        outbox.send(messages.encode(Phase("loading the weights")))
        parts = build_engine(spec.path, EngineConfig(**spec.options))
        outbox.send(messages.encode(Phase("warming up")))
        parts.grammars.prepare()
        warm_up(parts)
        outbox.send(messages.encode(describe(parts)))
        gc.collect()
        gc.freeze()  # what lives as long as the process is not looked through again: that would stop a step for long
        EngineProcess(parts, inbox, outbox, pulse).run()
        parts.close(_CLOSE_SECONDS)
    except BaseException as failure:
        user_error = isinstance(failure, UserError)
        if not user_error:
            traceback.print_exc()
        text = str(failure) if user_error else f"{type(failure).__name__}: {failure}"
        outbox.send(messages.encode(Failed(text[:_MAX_REASON], user_error)))
        code = 2 if user_error else 1
    outbox.close(linger=1000)
    out_context.term()
    sys.stderr.flush()
    os._exit(code)  # the pulse thread has no end of its own


def _connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)  # never drop, never block a step: the server reads or is gone
    socket.connect(address)
    return socket


def main() -> None:
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineSpec)
    configure(spec.log_level)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's interrupt is the server's to handle
    serve_engine(spec)


if __name__ == "__main__":
    main()
