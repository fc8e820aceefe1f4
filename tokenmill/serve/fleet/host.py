"""One model of a server: what was asked for, what it needs, and its service once it was loaded for the first time.

The service stays when the engine sleeps or is stopped: names, tokenizer, counters and stored responses outlive both.
Knows how to move between the states, not when: fleet.py decides.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tokenmill.engine.adapters.registry import split_option
from tokenmill.log import get_logger
from tokenmill.serve.fleet.catalog import ModelSpec
from tokenmill.serve.fleet.facts import ModelFacts
from tokenmill.serve.fleet.plan import Need
from tokenmill.serve.metrics import Metrics

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from tokenmill.serve.service import Service

_log = get_logger(__name__)
_STOP_SECONDS = 2.0  # for the engine to write its cached pages to the tiers
# A model that takes long to come back is not given up soon: swapping then takes a tenth of the time at most.
_TURN_FACTOR = 10.0
_MIN_TURN, _MAX_TURN = 0.5, 30.0

UNLOADED, ASLEEP, LOADED = "unloaded", "asleep", "loaded"
_OF_ENGINE = {"asleep": ASLEEP, "stopped": UNLOADED}
_AS_NUMBER = {UNLOADED: 0, ASLEEP: 1}


class Opener(Protocol):
    """Makes what a model needs in this process; server.py has it."""

    async def open(self, host: Host) -> tuple[Service, ASGIApp]:
        """Start the engine for the first time."""
        ...

    async def reopen(self, host: Host) -> None:
        """Start it again, after it was stopped."""
        ...

    async def shut(self, host: Host) -> None:
        """End what else runs for the model, after its engine was stopped."""
        ...


class Host:
    def __init__(self, spec: ModelSpec, facts: ModelFacts | None = None, need: Need | None = None) -> None:
        """`facts` and `need`: None where memory is not planned."""
        self.spec = spec
        self.facts = facts
        self.need = need or Need(0, 0, 0, 0)
        self.metrics = Metrics(spec.name)
        self.created = int(time.time())
        self.path: Path | None = facts.path if facts is not None else None
        self.service: Service | None = None
        self.app: ASGIApp | None = None
        self.moving = ""  # between two states: what is under way
        self.held = 0  # by how many operators who give it up: new requests wait
        self.yielding = False  # the same, because another model needs its memory
        self.failure = ""  # why it could not be loaded
        self.failed_at = 0.0
        self.leases = 0  # requests that use it
        self.waiters: list[tuple[float, asyncio.Future[None]]] = []  # by arrival
        self.last_used = time.monotonic()
        self.loaded_at = 0.0
        self.return_seconds = 0.0  # that it took to come back, when it was last given up
        self.keep_alive = spec.keep_alive
        self.expires = math.inf  # when it is given up, if no request comes

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def adapter_names(self) -> Collection[str]:
        """Also of a model that was not loaded yet: then those that it is started with."""
        if self.service is not None:
            return self.service.engine.adapters.by_name
        return [split_option(each)[0] for each in self.spec.engine.lora]

    def body_limit(self, path: str) -> int:
        """Bytes of the body of a request to `path`; it follows the context where none is set."""
        if self.service is not None:
            return self.service.config.body_limit(path)
        return self.spec.config.for_context(self.facts.context if self.facts is not None else 0).body_limit(path)

    @property
    def state(self) -> str:
        return LOADED if self.service is None and self.moving else self._settled

    @property
    def _settled(self) -> str:
        return UNLOADED if self.service is None else _OF_ENGINE.get(self.service.engine.state, LOADED)

    @property
    def usable(self) -> bool:
        """Whether a request may go to its engine now; one that restarts answers for itself."""
        return self._settled == LOADED and not (self.moving or self.held or self.yielding)

    @property
    def busy(self) -> bool:
        return self.leases > 0 or (self.service is not None and self.service.engine.num_in_flight > 0)

    @property
    def can_sleep(self) -> bool:
        return self.service is not None and not self.service.identity.no_sleep

    @property
    def turn_ends(self) -> float:
        """Until then it is not given up while it has requests."""
        return self.loaded_at + min(max(_MIN_TURN, _TURN_FACTOR * self.return_seconds), _MAX_TURN)

    # --- moves: one at a time, fleet.py sees to it ---

    async def load(self, opener: Opener) -> None:
        """Whatever state it is in. Raises what keeps it from being loaded."""
        if self._settled == LOADED:
            return
        how = "wake" if self._settled == ASLEEP else "load"
        with self._move("waking" if how == "wake" else "loading"):
            began, is_first = time.monotonic(), self.service is None
            if self.service is None:
                self.service, self.app = await opener.open(self)
            elif how == "wake":
                await self.service.engine.rest(False)
            else:
                await opener.reopen(self)
            self.loaded_at = time.monotonic()
            seconds = self.loaded_at - began
            if not (is_first and self.can_sleep):  # it comes back sooner than it came
                self.return_seconds = seconds
        self.failure = ""
        self.metrics.add("model_loads", 1.0, how)
        _log.info("%s: %s in %.2f s", self.name, "awake" if how == "wake" else "loaded", seconds)

    async def sleep(self, opener: Opener) -> None:
        """Or unload it, where it cannot sleep or fails to."""
        assert self.service is not None
        if not self.can_sleep:
            await self.unload(opener)
            return
        try:
            with self._move("going to sleep"):
                given_back = await self.service.engine.rest(True)
        except RuntimeError as error:
            _log.warning("%s cannot sleep and is unloaded: %s", self.name, error)
            await self.unload(opener)
            return
        self.metrics.add("model_evictions", 1.0, "sleep")
        _log.info("%s: asleep, %.0f MiB given back", self.name, given_back / 2**20)

    async def unload(self, opener: Opener) -> None:
        assert self.service is not None
        with self._move("unloading"):
            await self.service.engine.stop(_STOP_SECONDS)
            await opener.shut(self)
        self.metrics.add("model_evictions", 1.0, "unload")
        _log.info("%s: unloaded", self.name)

    def measure(self) -> None:
        """Set the metrics that are not counted as they come."""
        if self.service is None:
            self.metrics.set("engine_up", not self.failure)
        self.metrics.set("model_state", _AS_NUMBER.get(self._settled, 2))
        self.metrics.set("model_waiting_requests", len(self.waiters))

    @contextmanager
    def _move(self, what: str) -> Iterator[None]:
        self.moving = what
        try:
            yield
        finally:
            self.moving, self.expires = "", math.inf
