"""The engine process: an engine loop whose requests come as messages, and whose events leave as messages.

Started by the server as `python -m tokenmill.engine.process` with an EngineSpec on standard input; it ends when it is
told to, or when that pipe closes because the server is gone. One thread steps and owns its sockets; a side thread sends
heartbeats, so that a hang is seen from outside. SIGUSR1 prints all stacks to standard error. No HTTP, no text.
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
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain
from math import ceil
from pathlib import Path

import msgspec
import zmq

from tokenmill.config import EngineConfig
from tokenmill.engine import messages
from tokenmill.engine.activity import Activity
from tokenmill.engine.build import EngineParts, build_engine
from tokenmill.engine.deadlines import DeadlineError
from tokenmill.engine.loop import EngineLoop
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
    Submit,
)
from tokenmill.engine.stats import PROMPT_STEP_TOKENS
from tokenmill.engine.step_log import log_steps_to
from tokenmill.engine.step_meter import StepMeter
from tokenmill.engine.timelines import Timelines
from tokenmill.engine.usage_watch import UsageWatch
from tokenmill.errors import UserError
from tokenmill.log import configure, get_logger
from tokenmill.types import Request, SamplingParams, TokenEvent

_log = get_logger(__name__)
_IDLE_POLL_MS = 1000
_CLOSE_SECONDS = 1.5  # to write cached pages to the tiers; the server waits for two
_MAX_REASON = 500  # characters; the traceback is on standard error
_LOAD_LIMIT = 3600.0  # seconds: large weights from a slow disk
_WARM_UP_LIMIT = 600.0  # seconds: kernels are compiled
_STATS_SECONDS = 0.05  # between statistics, while tokens flow
_SWITCH_SECONDS = 0.0005  # until a thread beside the loop, such as a compiler, gives up the interpreter


class Pulse:
    """Sends a heartbeat at regular intervals from its own thread, and ends the process when the server is gone."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], spec: EngineSpec, activity: Activity) -> None:
        self.loop: EngineLoop | None = None  # once there is one: its steps are counted
        self.usage: UsageWatch | None = None  # the same
        self._context = context
        self._spec = spec
        self._activity = activity
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def _beat(self) -> None:
        socket = _connect(self._context, zmq.PUSH, self._spec.outbox)
        while True:
            loop = self.loop
            num_steps = loop.core.stats.num_steps if loop is not None else 0
            usage = self.usage.read() if self.usage is not None else (0, [])
            socket.send(messages.encode(Heartbeat(*self._activity.read(), num_steps, *usage)))
            readable, _, _ = select.select([sys.stdin], [], [], self._spec.heartbeat_seconds)
            if readable and not os.read(sys.stdin.fileno(), 1):
                os._exit(0)  # the server has ended: nobody waits for an answer


class EngineProcess:
    """The loop's inbox and listener: messages in, messages out."""

    def __init__(
        self, parts: EngineParts, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], activity: Activity
    ) -> None:
        self._parts = parts
        self._inbox = inbox
        self._outbox = outbox
        self._activity = activity
        self._stats_sent = 0.0
        self.loop = EngineLoop(parts.core, self, parts.grammars, parts.idle_work, activity)
        self.closed = False

    # --- to the loop ---

    def receive(self, timeout: float | None) -> None:
        """Take in all messages that wait. One that cannot be used is answered, no more."""
        if timeout != 0.0:
            self._inbox.poll(_IDLE_POLL_MS if timeout is None else min(_IDLE_POLL_MS, ceil(1000 * timeout)))
        while int(self._inbox.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # between steps: cheaper than a poll
            self._activity.begin("taking messages in")
            data = self._inbox.recv()
            try:
                message = messages.decode_to_engine(data)
            except (msgspec.DecodeError, UserError, RecursionError) as error:
                _log.warning("unusable message of %d bytes: %s", len(data), error)
                self._send(Refused("", str(error)))
                continue
            self._handle(message)

    def _handle(self, message: messages.ToEngine) -> None:
        match message:
            case Submit():
                problem = self._problem(message)
                if problem:
                    self._send(Refused(message.request_id, problem))
                else:
                    self.loop.submit(message.request())
            case Cancel(request_id=request_id, index=index):
                self.loop.cancel(request_id, index)
            case Ping(number=number):
                self._send(Pong(number))
            case Shutdown():
                self.closed = True

    def _problem(self, message: Submit) -> str | None:
        """Why the scheduler could not take this request; None if it can."""
        context, vocab_size = self._parts.config.context, self._parts.description.vocab_size
        if not 0 < len(message.prompt_ids) <= context:
            return f"the prompt has {len(message.prompt_ids)} tokens, the context holds {context}"
        params = message.params
        named: list[Iterable[int]] = [params.logit_bias or (), params.allowed_token_ids or (), *params.bad_word_ids]
        ids = (*message.prompt_ids, *message.stop_ids, *chain.from_iterable(named))
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            return f"a token id is outside the vocabulary of {vocab_size}"
        if not 0 < message.weight < float("inf"):
            return f"weight {message.weight} is not a positive number"
        if self.loop.knows(message.request_id):
            return f"request id '{message.request_id}' is in use"
        if message.params.cache is not None:
            try:
                self._parts.budgets.check(message.params)
            except UserError as error:
                return str(error)
        return None

    # --- from the loop ---

    def on_events(self, events: list[TokenEvent]) -> None:
        """The statistics take longer to encode and read than a few tokens do: not with each of them."""
        core, now = self._parts.core, time.monotonic()
        flowing = events and core.has_work and core.stats.step_tokens < PROMPT_STEP_TOKENS
        if flowing and now - self._stats_sent < _STATS_SECONDS:
            self._send(Events(events))
        else:
            self._stats_sent = now
            self._send(Events(events, core.stats, core.meter.take() if core.meter is not None else {}))

    def on_refused(self, request_id: str, error: UserError) -> None:
        code = "deadline" if isinstance(error, DeadlineError) else ""
        self._send(Refused(request_id, str(error), code))

    def _send(self, message: FromEngine) -> None:
        self._outbox.send(messages.encode(message))


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
    loop = EngineLoop(parts.core)
    loop.submit(Request("warm-up", [min(5, parts.description.vocab_size - 1)] * max(1, length), params))
    loop.drain()
    parts.kv.clear()


def serve_engine(spec: EngineSpec) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    out_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # its own: ending it sends what is left
    outbox = _connect(out_context, zmq.PUSH, spec.outbox)
    inbox = _connect(context, zmq.PULL, spec.inbox)
    activity = Activity("loading the weights", _LOAD_LIMIT)
    pulse = Pulse(context, spec, activity)
    code = 0
    try:
        outbox.send(messages.encode(Phase("loading the weights")))
        parts = build_engine(spec.path, EngineConfig(**spec.options))
        activity.begin("warming up", _WARM_UP_LIMIT)
        outbox.send(messages.encode(Phase("warming up")))
        parts.grammars.prepare()
        warm_up(parts)
        outbox.send(messages.encode(describe(parts)))
        gc.collect()
        gc.freeze()  # what lives as long as the process is not looked through again: that would stop a step for long
        if spec.step_log:
            log_steps_to(Path(spec.step_log), parts)
        parts.core.meter = StepMeter() if spec.meters else None
        parts.core.timelines = Timelines()
        process = EngineProcess(parts, inbox, outbox, activity)
        pulse.usage = UsageWatch()
        pulse.loop = process.loop
        process.loop.run(process)
        activity.begin("writing cached pages to the tiers")
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
    line = sys.stdin.buffer.readline()  # a spare process waits here until it is needed
    if not line:
        return  # the server has ended
    spec = msgspec.json.decode(line, type=EngineSpec)
    configure(spec.log_level)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's interrupt is the server's to handle
    sys.setswitchinterval(_SWITCH_SECONDS)
    serve_engine(spec)


if __name__ == "__main__":
    main()
