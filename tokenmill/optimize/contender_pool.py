"""The children of a laboratory: which engine each holds, and who is unloaded when memory is short.

A child that is no longer needed for one candidate serves the next: starting one takes seconds. One that died while
nothing was asked of it is replaced silently. Knows neither candidates nor the store. Called by the laboratory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tokenmill.bench.prompts import SyntheticRequest
from tokenmill.config import EngineConfig
from tokenmill.hardware.machine import available_memory
from tokenmill.optimize.contender import Contender, ContenderError
from tokenmill.optimize.contender_messages import AskMemory, Command, Done, Load, Loaded, Memory, Unload, WarmUp

T = TypeVar("T")
LOAD_FACTOR = 1.3  # memory of a loaded model over its file: repacked weights and buffers
_MEMORY_SHARE = 0.95  # of the free memory that one child may take


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """What one candidate may cost. Seconds per command; `memory_bytes`: of one child, 0: what is free."""

    load_seconds: float = 180.0
    run_seconds: float = 300.0
    quality_seconds: float = 600.0
    build_seconds: float = 3600.0
    replay_seconds: float = 600.0
    rate_search_seconds: float = 30.0
    memory_bytes: int = 0

    @classmethod
    def within(cls, seconds: float) -> ResourceLimits:
        """For a run of `seconds`: no command may take more than a third of it, however it hangs."""
        command, judgement = max(60.0, seconds / 4), max(120.0, seconds / 3)
        search = min(120.0, max(8.0, seconds / 12))
        return cls(command, command, judgement, max(600.0, seconds), judgement, search)


@dataclass(slots=True, eq=False)
class Place:
    """A child and the engine that it holds. `name`: of the engine, "" if none."""

    contender: Contender
    name: str = ""
    is_warm: bool = False
    is_judge: bool = False  # it has a judge with its texts and tokens ready


class ContenderPool:
    def __init__(self, log: Path, device: str, limits: ResourceLimits) -> None:
        self.limits = limits
        self.is_crowded = False  # an engine had to go for another one
        self._log = log
        self._device = device
        self._places: list[Place] = []

    def engine(self, name: str, together: Collection[str], path: Path, nbytes: int, config: EngineConfig) -> Place:
        """The child with this engine, loaded if need be; engines that are not of `together` are unloaded. `nbytes`: of
        its weights."""
        self._drop_dead()
        for place in self._places:
            if place.name == name:
                return place
        for place in self._loaded():
            if place.name not in together:
                self._release(place)
        needed, device_bytes = int(nbytes * LOAD_FACTOR), 0
        if self._device == "cuda":
            place = self.idle()
            device_bytes = self._room_on_device(place, needed)
            if config.gpu_memory_utilization is None:
                config = config.fill("GPU memory beside other contenders", memory=max(1, device_bytes - needed))
        else:
            place = self.idle(needed)
            if needed > (free := available_memory()):
                raise ContenderError(
                    f"out of memory: it needs about {needed >> 20:,} MiB, {free >> 20:,} MiB are free",
                    "free some memory",
                )
        self.ask(place, Load(path, config, device_bytes), Loaded, self.limits.load_seconds, "loading")
        place.name, place.is_warm = name, False
        return place

    def warm_up(self, place: Place, request: SyntheticRequest) -> None:
        if not place.is_warm:
            self.ask(place, WarmUp(request), Done, self.limits.load_seconds, "warming up")
            place.is_warm = True

    def idle(self, needed: int = 0, judging: bool = False) -> Place:
        """A child without an engine; for `judging` the one that judged before, else rather another. Others' engines are
        unloaded until `needed` bytes of memory are free."""
        self._drop_dead()
        while needed > available_memory() * _MEMORY_SHARE and (loaded := self._loaded()):
            self._evict(loaded[0])
        free = [each for each in self._places if not each.name]
        place = min(free, key=lambda each: each.is_judge != judging, default=None)
        if place is None:
            place = Place(Contender(self._log))
            self._places.append(place)
        place.is_judge |= judging
        place.contender.memory_limit = self.limits.memory_bytes or int(available_memory() * _MEMORY_SHARE)
        return place

    def ask(self, place: Place, command: Command, answer: type[T], seconds: float, doing: str) -> T:
        """A child that fails holds no engine afterwards, and is gone if it was killed."""
        try:
            return place.contender.ask(command, answer, seconds, doing)
        except BaseException:
            place.name = ""
            self._drop_dead()
            raise

    def release(self, name: str) -> None:
        """Unload the engine of this name; its child stays for the next one."""
        for place in self._loaded():
            if place.name == name:
                self._release(place)

    def release_all(self) -> None:
        for place in self._loaded():
            self._release(place)

    def close(self) -> None:
        for place in self._places:
            place.contender.close()
        self._places.clear()

    def _loaded(self) -> list[Place]:
        return [place for place in self._places if place.name]

    def _drop_dead(self) -> None:
        self._places = [place for place in self._places if place.contender.is_running()]

    def _release(self, place: Place) -> None:
        place.name, place.is_warm = "", False
        with contextlib.suppress(ContenderError):  # it died: its memory is free as well
            self.ask(place, Unload(), Done, self.limits.load_seconds, "unloading")

    def _evict(self, place: Place) -> None:
        self.is_crowded = True
        self._release(place)

    def _room_on_device(self, place: Place, needed: int) -> int:
        """Bytes of GPU memory that one more engine may take; others are unloaded until it fits."""
        while True:
            memory = self.ask(place, AskMemory(self._device), Memory, self.limits.load_seconds, "starting")
            room = int(memory.device_free_bytes * _MEMORY_SHARE)
            loaded = self._loaded()
            if needed <= room or not loaded:
                return room
            self._evict(loaded[0])
