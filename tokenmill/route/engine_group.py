"""Several engines of one model behind one server (--data-parallel-size): each request goes to the one that suits it.

The server sees one engine. Every prompt is given to an engine by a policy of the router, which looks at what the
engines have cached and have to do: here from within their server, so that nothing is a message or a guess. An engine
that dies is replaced by its own supervisor; its requests go on in another one, after the tokens that they have, and
only those with several answers under way end with an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.engine.kv.page_names import salted_root
from tokenmill.engine.merged_stats import merged_stats, since
from tokenmill.engine.messages import AdapterAnswer, AdapterInfo, Heartbeat, Ready, ToEngine
from tokenmill.engine.stats import EngineStats
from tokenmill.log import get_logger
from tokenmill.route.merged_pages import MergedPages
from tokenmill.route.policies.base import Policy
from tokenmill.route.policies.prefix_aware import PrefixAware
from tokenmill.route.prompt import Prompt
from tokenmill.route.target import Target, Ticket
from tokenmill.serve.errors import ApiError, engine_gone
from tokenmill.serve.generation import Generation, Member
from tokenmill.serve.supervision.engine_client import EngineClient
from tokenmill.serve.supervision.listening import Observer
from tokenmill.types import Request

_log = get_logger(__name__)


class EngineTarget(Target):
    """One engine as a policy sees it."""

    def __init__(self, engine: EngineClient, number: int, clock: Callable[[], float]) -> None:
        super().__init__(number, clock)
        self.engine = engine
        self.tickets: dict[str, Ticket] = {}  # by request
        self._feed, self._sequence = "", 0
        self._opening: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """Catch up with what the engine has cached."""
        feed, identity = self.engine.pages, self.engine.identity
        assert identity is not None
        if not feed.root and (self._opening is None or self._opening.done()):
            self._opening = asyncio.create_task(feed.open(identity))  # names come with later requests
        changes = feed.since(self._feed, self._sequence)
        if changes is None:
            self.pages.apply(feed.pages, self.pages.stored - set(feed.pages))
        for change in changes or ():
            self.pages.apply((name for name, _ in change.stored), change.removed)
        self._feed, self._sequence = feed.feed, feed.sequence
        self.root, self.page_size = feed.root, int(identity.options.get("page_size") or 0)

    def prompt(self, request: Request) -> Prompt:
        salt = request.cache_salt if request.adapter is None else request.adapter.digest + request.cache_salt
        root = (salted_root(self.root, salt), self.page_size)
        return Prompt(request.token_ids, roots={self.number: root} if self.root else {})

    def close_ticket(self, request_id: str, failed: bool = False) -> None:
        ticket = self.tickets.pop(request_id, None)
        if ticket is not None:
            ticket.close(failed)


class EngineGroup:
    """Looks to a server like one engine (serve/supervision/engine.py)."""

    def __init__(self, engines: Sequence[EngineClient], policy: Policy | None = None) -> None:
        self._policy = policy or PrefixAware()
        self._targets = [EngineTarget(engine, number, time.monotonic) for number, engine in enumerate(engines)]
        self._observers: list[Observer] = []
        self._counted = EngineStats()  # when an engine was last replaced: metrics count from zero then
        self.adapters = GroupAdapters(engines)
        self.pages = MergedPages([engine.pages for engine in engines])
        for target in self._targets:
            target.engine.observe(_Relay(self, target))
            target.engine.rescue = lambda member, left=target: self._rescue(member, left)  # type: ignore[misc]

    @property
    def engines(self) -> list[EngineClient]:
        return [target.engine for target in self._targets]

    # --- start and stop ---

    async def start(self) -> Ready:
        await asyncio.gather(*(engine.start() for engine in self.engines))
        _log.info("%d engines: processes %s", len(self.engines), ", ".join(str(engine.pid) for engine in self.engines))
        identity = self.identity
        assert identity is not None
        return identity

    async def stop(self, timeout: float = 2.0) -> None:
        await asyncio.gather(*(engine.stop(timeout) for engine in self.engines))

    async def close(self, timeout: float = 2.0) -> None:
        await asyncio.gather(*(engine.close(timeout) for engine in self.engines))

    async def rest(self, asleep: bool) -> int:
        return sum(await asyncio.gather(*(engine.rest(asleep) for engine in self.engines)))

    def observe(self, observer: Observer) -> None:
        self._observers.append(observer)

    # --- what it is ---

    @property
    def path(self) -> Path:
        return self.engines[0].path

    @property
    def state(self) -> str:
        """That of any engine that takes requests; where none does, of the first."""
        return next((engine.state for engine in self.engines if engine.state == "ready"), self.engines[0].state)

    @property
    def identity(self) -> Ready | None:
        """That of each, with room for the requests of all."""
        one = self.engines[0].identity
        if one is None:
            return None
        together = {"concurrency": one.options["concurrency"] * len(self.engines)}
        return msgspec.structs.replace(one, options={**one.options, **together})

    @property
    def stats(self) -> EngineStats:
        return since(self._total(), self._counted)

    def _total(self) -> EngineStats:
        return merged_stats([engine.stats for engine in self.engines])

    @property
    def pid(self) -> int | None:
        return self.engines[0].pid

    @property
    def spare_pid(self) -> int | None:
        return self.engines[0].spare_pid

    @property
    def heartbeat(self) -> Heartbeat:
        return self.engines[0].heartbeat

    @property
    def supervised(self) -> bool:
        return all(engine.supervised for engine in self.engines)

    @property
    def num_in_flight(self) -> int:
        return sum(engine.num_in_flight for engine in self.engines)

    async def ready(self) -> tuple[bool, str]:
        answers = await asyncio.gather(*(engine.ready() for engine in self.engines))
        up = [what for is_up, what in answers if is_up]
        if len(up) == len(answers):
            return True, up[0]
        down = next(what for is_up, what in answers if not is_up)
        return bool(up), f"{len(up)} of {len(answers)} engines are ready: {down}"

    # --- callbacks of the server: of every engine ---

    def _set_all(self, name: str, value: Any) -> None:
        for engine in self.engines:
            setattr(engine, name, value)

    @property
    def on_device_time(self) -> Callable[[dict[str, float]], None]:
        return self.engines[0].on_device_time

    @on_device_time.setter
    def on_device_time(self, value: Callable[[dict[str, float]], None]) -> None:
        self._set_all("on_device_time", value)

    @property
    def on_stopped(self) -> Callable[[], None]:
        return self.engines[0].on_stopped

    @on_stopped.setter
    def on_stopped(self, value: Callable[[], None]) -> None:
        self._set_all("on_stopped", value)

    @property
    def on_source_wanted(self) -> Callable[[Member], None]:
        return self.engines[0].on_source_wanted

    @on_source_wanted.setter
    def on_source_wanted(self, value: Callable[[Member], None]) -> None:
        self._set_all("on_source_wanted", value)

    # --- requests ---

    def submit(self, generation: Generation) -> None:
        """Each prompt to an engine of its own choice."""
        try:
            for member in generation.members:
                self._give(member)
        except ApiError:
            self.withdraw(generation)
            raise

    def withdraw(self, generation: Generation) -> None:
        for target in self._targets:
            target.engine.withdraw(generation)
        for member in generation.members:
            self._close_ticket(member)

    def tell(self, message: ToEngine) -> None:
        for engine in self.engines:
            engine.tell(message)

    def fail_all(self, message: str) -> None:
        for engine in self.engines:
            engine.fail_all(message)

    def _give(self, member: Member) -> None:
        usable = [target for target in self._targets if target.engine.state == "ready"]
        if not usable:
            raise engine_gone(f"the engines are {self.state}; try again soon")
        request = member.request
        for target in usable:
            target.follow()
        roots = {target.number: root for target in usable for root in target.prompt(request).roots.values()}
        prompt = Prompt(request.token_ids, roots=roots)
        chosen = self._policy.choose(prompt, usable)
        chosen.engine.take_on(member)
        chosen.tickets[request.request_id] = chosen.open(prompt, request.params.max_tokens)

    def _rescue(self, member: Member, left: EngineTarget) -> bool:
        """A request whose engine is gone: True if another one goes on with it."""
        request, completions = member.request, member.output.outputs
        left.close_ticket(request.request_id, failed=True)
        begun = any(each.token_ids for each in completions)
        if begun and request.params.n > 1:
            return False
        if begun:
            request.token_ids = [*request.prompt_ids, *completions[0].token_ids]
            request.deadline = None  # for the first token, which it has
        try:
            self._give(member)
        except ApiError:
            return False
        return True

    def _close_ticket(self, member: Member) -> None:
        for target in self._targets:
            target.close_ticket(member.request.request_id)

    # --- from the engines ---

    def on_step(self, stats: EngineStats) -> None:
        together = self.stats
        ready = sum(engine.state == "ready" for engine in self.engines)
        # The pace of all, by the last step of one.
        together.step_tokens, together.step_seconds = stats.step_tokens * ready, stats.step_seconds
        for observer in self._observers:
            observer.on_step(together)

    def on_tokens(self, target: EngineTarget, member: Member, num_tokens: int) -> None:
        ticket = target.tickets.get(member.request.request_id)
        if ticket is not None and num_tokens:
            ticket.started()
        if member.finished:
            self._close_ticket(member)
        for observer in self._observers:
            observer.on_tokens(member, num_tokens)

    def on_end(self, member: Member) -> None:
        self._close_ticket(member)
        for observer in self._observers:
            observer.on_end(member)

    def on_restart(self, reason: str) -> None:
        self._counted = self._total()
        for observer in self._observers:
            observer.on_restart(reason)


class _Relay:
    """What one engine did, to all who observe the group."""

    def __init__(self, group: EngineGroup, target: EngineTarget) -> None:
        self._group, self._target = group, target

    def on_step(self, stats: EngineStats) -> None:
        self._group.on_step(stats)

    def on_tokens(self, member: Member, num_tokens: int) -> None:
        self._group.on_tokens(self._target, member, num_tokens)

    def on_end(self, member: Member) -> None:
        self._group.on_end(member)

    def on_restart(self, reason: str) -> None:
        self._group.on_restart(reason)


class GroupAdapters:
    """Adapters of a group: all engines have the same."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self._engines = engines

    @property
    def by_name(self) -> dict[str, AdapterInfo]:
        first, *others = (engine.adapters.by_name for engine in self._engines)
        return {name: adapter for name, adapter in first.items() if all(name in each for each in others)}

    async def load(self, name: str, path: str, replaces: bool) -> AdapterAnswer:
        """By all of them, or by none: what one refuses is taken from the others again."""
        answers = await asyncio.gather(*(engine.adapters.load(name, path, replaces) for engine in self._engines))
        failed = next((answer for answer in answers if answer.error), None)
        if failed is None:
            return answers[0]
        for engine, answer in zip(self._engines, answers, strict=True):
            if not answer.error:
                await engine.adapters.unload(name, True)
        return failed

    async def unload(self, name: str, drains: bool) -> AdapterAnswer:
        answers = await asyncio.gather(*(engine.adapters.unload(name, drains) for engine in self._engines))
        return next((answer for answer in answers if answer.error), answers[0])
