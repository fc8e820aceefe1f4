"""The engine process: an engine loop whose requests come as messages, and whose events leave as messages.

Started by the server as `python -m tokenmill.engine.process` with an EngineSpec on standard input; it ends when it is
told to, or when that pipe closes because the server is gone. One thread steps and owns its sockets; pulse.py sends
heartbeats from another, so that a hang is seen from outside. SIGUSR1 prints all stacks to standard error. No HTTP, no
text.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, astuple
from itertools import chain
from math import ceil
from pathlib import Path

import msgspec
import zmq

from tokenmill.checkpoint.embedding_files import read_settings
from tokenmill.config import EngineConfig
from tokenmill.engine import messages
from tokenmill.engine.activity import Activity
from tokenmill.engine.adapters.registry import AdapterError, AdapterVersion
from tokenmill.engine.build import EngineParts, build_engine
from tokenmill.engine.deadlines import DeadlineError
from tokenmill.engine.embedding.build import EncoderParts, build_encoder, describe_encoder_parts, is_encoder
from tokenmill.engine.embedding.core import TokenMeter
from tokenmill.engine.kv.page_log import PageLog
from tokenmill.engine.loop import EngineLoop
from tokenmill.engine.messages import (
    AdapterAnswer,
    AdapterInfo,
    Cancel,
    EngineSpec,
    Events,
    Failed,
    FromEngine,
    LoadAdapter,
    Pages,
    Phase,
    Ping,
    Pong,
    Ready,
    Refused,
    Rest,
    Rested,
    Shutdown,
    Submit,
    UnloadAdapter,
    WatchPages,
)
from tokenmill.engine.pulse import Pulse, bind_socket
from tokenmill.engine.stats import PROMPT_STEP_TOKENS
from tokenmill.engine.step_log import log_steps_to
from tokenmill.engine.step_meter import StepMeter
from tokenmill.engine.tiers import page_meaning
from tokenmill.engine.timelines import Timelines
from tokenmill.engine.usage_watch import UsageWatch
from tokenmill.errors import UserError
from tokenmill.log import configure, get_logger
from tokenmill.runtime.sleeping import SleepingRuntime
from tokenmill.types import Request, SamplingParams, TokenEvent

_log = get_logger(__name__)
_IDLE_POLL_MS = 1000
_CLOSE_SECONDS = 1.5  # to write cached pages to the tiers; the server waits for two
_MAX_REASON = 500  # characters; the traceback is on standard error
_LOAD_LIMIT = 3600.0  # seconds: large weights from a slow disk
_WARM_UP_LIMIT = 600.0  # seconds: kernels are compiled
_CAPTURE_SECONDS = 60.0  # of the warm-up, for capturing steps
_REST_LIMIT = 600.0  # seconds: large weights are written to a slow disk, or read from it
_REST_SAVE_SECONDS = 10.0  # to write cached pages to the tiers before they are dropped
_STATS_SECONDS = 0.05  # between statistics, while tokens flow
_SWITCH_SECONDS = 0.0005  # until a thread beside the loop, such as a compiler, gives up the interpreter


class EngineProcess:
    """The loop's inbox and listener: messages in, messages out."""

    def __init__(
        self, parts: EngineParts | EncoderParts, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], activity: Activity
    ) -> None:
        self._parts = parts
        self._inbox = inbox
        self._outbox = outbox
        self._activity = activity
        self._stats_sent = 0.0
        self._sleeping: SleepingRuntime | None = None  # once it was told to
        self._page_log: PageLog | None = None  # the same
        self.loop = EngineLoop(parts.core, self, parts.grammars, parts.idle_work, activity, adapters=parts.adapters)
        self.closed = False
        if isinstance(parts, EngineParts) and parts.kv.sources.peers is not None:
            parts.kv.sources.peers.on_wanted = lambda request_id: self._send(messages.SourceWanted(request_id))

    # --- to the loop ---

    def receive(self, timeout: float | None) -> None:
        """Take in all messages that wait. One that cannot be used is answered, no more."""
        if timeout != 0.0:
            if isinstance(self._parts, EngineParts):
                self._parts.runtime.check()  # no step would notice that a rank has ended
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
                self._submit(message)
            case LoadAdapter(number, name, path, replaces):
                answer = _answer_to(number, self._send)
                self._parts.adapters.load(name, path, replaces, answer)
            case UnloadAdapter(number, name, drains):
                answer = _answer_to(number, self._send)
                try:
                    self._parts.adapters.unload(name, drains, answer)
                except UserError as error:
                    answer(None, error)
            case Cancel(request_id=request_id, index=index):
                self.loop.cancel(request_id, index)
            case messages.SourceFailed(request_id=request_id):
                if isinstance(self._parts, EngineParts):
                    self._parts.kv.sources.source_failed(request_id)
            case Ping(number=number):
                self._send(Pong(number))
            case Rest(asleep=asleep):
                self._rest(asleep)
            case WatchPages(root=root) if isinstance(self._parts, EngineParts):
                self._page_log = self._parts.kv.watch(root)
                self._tell_pages()
            case Shutdown():
                self.closed = True

    def _submit(self, message: Submit) -> None:
        problem, code = self._problem(message), ""
        request = message.request()
        if problem is None and message.adapter:
            try:
                request.adapter = self._parts.adapters.find(message.adapter)
            except AdapterError as error:
                problem, code = str(error), error.code
        if problem is not None:
            self._send(Refused(message.request_id, problem, code))
        else:
            self.loop.submit(request)

    def _rest(self, asleep: bool) -> None:
        """Sleep or wake up. The server sends nothing else meanwhile; weights that cannot be read back end the process,
        which is then replaced."""
        if isinstance(self._parts, EncoderParts):
            self._send(Rested(False, problem="a model for vectors does not sleep: unload it" if asleep else ""))
            return
        sleeping = self._sleeping = self._sleeping or SleepingRuntime(self._parts.runtime)
        if asleep == sleeping.asleep:
            self._send(Rested(asleep))
        elif not asleep:
            self._activity.begin("waking up", _REST_LIMIT)
            sleeping.wake()
            self._send(Rested(False))
        elif self.loop.has_work:
            self._send(Rested(False, problem="requests are running"))
        else:
            self._activity.begin("going to sleep", _REST_LIMIT)
            self._parts.kv.save(_REST_SAVE_SECONDS)
            self._parts.kv.clear()
            self._parts.core.scheduler.measure()
            self.on_events([])  # no page is cached any more
            try:
                self._send(Rested(True, sleeping.sleep()))
            except (UserError, RuntimeError, OSError) as error:
                sleeping.wake()
                self._send(Rested(False, problem=str(error)))

    def _problem(self, message: Submit) -> str | None:
        """Why the scheduler could not take this request; None if it can."""
        if self._sleeping is not None and self._sleeping.asleep:
            return "the engine is asleep"
        context, vocab_size = self._parts.config.context, self._parts.description.vocab_size
        num_tokens = len(message.prompt_ids) + len(message.output_ids)
        if not message.prompt_ids or num_tokens > context:
            return f"the prompt has {num_tokens} tokens, the context holds {context}"
        params = message.params
        named: list[Iterable[int]] = [params.logit_bias or (), params.allowed_token_ids or (), *params.bad_word_ids]
        ids = (*message.prompt_ids, *message.output_ids, *message.stop_ids, *chain.from_iterable(named))
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            return f"a token id is outside the vocabulary of {vocab_size}"
        if not 0 < message.weight < float("inf"):
            return f"weight {message.weight} is not a positive number"
        if self.loop.knows(message.request_id):
            return f"request id '{message.request_id}' is in use"
        if isinstance(self._parts, EncoderParts):
            return None if message.embeds else "this model gives vectors or scores, and no text"
        if message.params.cache is not None:
            try:
                self._parts.budgets.check(message.params)
            except UserError as error:
                return str(error)
        return None

    # --- from the loop ---

    def _tell_pages(self) -> None:
        came, left = self._page_log.take() if self._page_log is not None else ([], [])
        if came or left:
            self._send(Pages(came, left))

    def on_events(self, events: list[TokenEvent]) -> None:
        """The statistics take longer to encode and read than a few tokens do: not with each of them."""
        core, now = self._parts.core, time.monotonic()
        self._tell_pages()
        flowing = events and core.has_work and core.stats.step_tokens < PROMPT_STEP_TOKENS
        if flowing and now - self._stats_sent < _STATS_SECONDS:
            self._send(Events(events))
        else:
            self._stats_sent = now
            self._send(Events(events, core.stats, core.meter.take() if core.meter is not None else {}))

    def on_refused(self, request_id: str, error: UserError) -> None:
        code = "deadline" if isinstance(error, DeadlineError) else getattr(error, "code", "")
        self._send(Refused(request_id, str(error), code))

    def _send(self, message: FromEngine) -> None:
        self._outbox.send(messages.encode(message))


def _answer_to(
    number: int, send: Callable[[FromEngine], None]
) -> Callable[[AdapterVersion | None, UserError | None], None]:
    """What the registry calls once it is done: sends the answer."""

    def answer(version: AdapterVersion | None, error: UserError | None) -> None:
        info = AdapterInfo(*astuple(version)) if version is not None else None
        text = "" if error is None else str(error)[:_MAX_REASON]
        send(AdapterAnswer(number, info, text, getattr(error, "code", "")))

    return answer


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
        [AdapterInfo(*astuple(version)) for version in parts.adapters.versions()],
        read_settings(parts.path),
        SleepingRuntime(parts.runtime).declines,
        page_meaning(parts.config, parts.runtime) if parts.config.prefix_caching else "",
    )


def warm_up(parts: EngineParts) -> None:
    """Compute a few tokens, so that "ready" has seen tokens move and the first request finds everything in place."""
    length = min(16, parts.config.context - 4)
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    loop = EngineLoop(parts.core)
    loop.submit(Request("warm-up", [min(5, parts.description.vocab_size - 1)] * max(1, length), params))
    loop.drain()
    parts.kv.clear()
    # Steps are captured before traffic comes, not during it: a kind costs some 50 ms the first two times, and a load of
    # changing size meets a hundred kinds. The rest, if compiling takes long, is done in idle moments.
    deadline = time.monotonic() + _CAPTURE_SECONDS
    while time.monotonic() < deadline and parts.runtime.runner.prepare():
        pass


def start(spec: EngineSpec, activity: Activity, tell: Callable[[FromEngine], None]) -> EngineParts | EncoderParts:
    """Load the model, have it compute something, and tell what it is."""
    tell(Phase("loading the weights"))
    options = EngineConfig(**spec.options)
    parts = build_encoder(spec.path, options) if is_encoder(Path(spec.path)) else build_engine(spec.path, options)
    activity.begin("warming up", _WARM_UP_LIMIT)
    tell(Phase("warming up"))
    if isinstance(parts, EncoderParts):
        parts.warm_up()
        tell(describe_encoder_parts(parts))
        parts.core.meter = TokenMeter() if spec.meters else None
        return parts
    _load_again(parts, spec.adapters)
    parts.grammars.prepare()
    warm_up(parts)
    tell(describe(parts))
    if spec.step_log:
        log_steps_to(Path(spec.step_log), parts)
    parts.core.meter = StepMeter() if spec.meters else None
    parts.core.timelines = Timelines()
    return parts


def serve_engine(spec: EngineSpec) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    out_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # its own: ending it sends what is left
    outbox = bind_socket(out_context, zmq.PUSH, spec.outbox)
    inbox = bind_socket(context, zmq.PULL, spec.inbox)
    activity = Activity("loading the weights", _LOAD_LIMIT)
    pulse = Pulse(context, spec, activity)
    code = 0
    try:
        parts = start(spec, activity, lambda message: outbox.send(messages.encode(message)))
        gc.collect()
        gc.freeze()  # what lives as long as the process is not looked through again: that would stop a step for long
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


def _load_again(parts: EngineParts, adapters: dict[str, str]) -> None:
    """What the last engine had. Requests of an adapter that is gone are refused; it keeps no other from running."""
    for name, path in adapters.items():
        try:
            parts.adapters.load_now(name, path)
        except UserError as error:
            _log.error("adapter '%s' could not be loaded again: %s", name, error)


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
