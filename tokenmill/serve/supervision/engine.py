"""What a server needs of its engine: one process (engine_client.py), or several that share the requests of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tokenmill.engine.messages import AdapterAnswer, AdapterInfo, Heartbeat, Ready, ToEngine
from tokenmill.engine.stats import EngineStats
from tokenmill.serve.generation import Generation, Member
from tokenmill.serve.supervision.listening import Observer
from tokenmill.serve.supervision.page_feed import PageChanges

if TYPE_CHECKING:
    from tokenmill.serve.supervision.engine_client import EngineClient


class EngineAdapters(Protocol):
    @property
    def by_name(self) -> Mapping[str, AdapterInfo]: ...

    async def load(self, name: str, path: str, replaces: bool) -> AdapterAnswer: ...

    async def unload(self, name: str, drains: bool) -> AdapterAnswer: ...


class Engine(Protocol):
    """Members as EngineClient documents them."""

    on_device_time: Callable[[dict[str, float]], None]
    on_stopped: Callable[[], None]
    on_source_wanted: Callable[[Member], None]

    @property
    def path(self) -> Path: ...

    @property
    def state(self) -> str: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def identity(self) -> Ready | None: ...

    @property
    def adapters(self) -> EngineAdapters: ...

    @property
    def pages(self) -> PageChanges: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def spare_pid(self) -> int | None: ...

    @property
    def heartbeat(self) -> Heartbeat: ...

    @property
    def supervised(self) -> bool: ...

    @property
    def num_in_flight(self) -> int: ...

    async def start(self) -> Ready: ...

    async def stop(self, timeout: float = 2.0) -> None: ...

    async def close(self, timeout: float = 2.0) -> None: ...

    async def rest(self, asleep: bool) -> int: ...

    async def ready(self) -> tuple[bool, str]: ...

    def observe(self, observer: Observer) -> None: ...

    def submit(self, generation: Generation) -> None: ...

    def withdraw(self, generation: Generation) -> None: ...

    def tell(self, message: ToEngine) -> None: ...

    def fail_all(self, message: str) -> None: ...


# Makes one engine of several processes: route/engine_group.py, which this layer does not know.
Grouping = Callable[[Sequence["EngineClient"]], Engine]
