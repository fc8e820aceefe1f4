"""What counts as a hang of the engine, and what does not: long activities, a frozen server, a paused machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.unit.engine.test_loop import Clock
from tokenmill.engine.activity import IDLE
from tokenmill.engine.messages import Heartbeat
from tokenmill.serve.supervision.watchdog import Watchdog


@dataclass
class Engine:
    last_sign: float
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(IDLE, 0.1))


class Watched:
    """An engine that beats, and a watchdog that looks, four times a second of a clock of their own."""

    def __init__(self, stall_timeout: float = 10.0) -> None:
        self.clock = Clock()
        self.dog = Watchdog(stall_timeout, self.clock)
        self.engine = Engine(self.clock())

    def run(self, seconds: float, heartbeat: Heartbeat | None = None, ages: bool = False) -> str | None:
        """The first hang that is seen. `heartbeat`: what comes all the time, with a growing age if it `ages`."""
        for number in range(int(4 * seconds)):
            self.clock.advance(0.25)
            if heartbeat is not None:
                self.engine.last_sign = self.clock()
                age = heartbeat.age + (0.25 * number if ages else 0.0)
                self.engine.heartbeat = Heartbeat(heartbeat.activity, age, heartbeat.limit)
            hang = self.dog.look(self.engine)
            if hang is not None:
                return hang
        return None


def test_an_engine_that_beats_is_well() -> None:
    watched = Watched()
    assert watched.run(600, Heartbeat(IDLE, 0.9)) is None
    assert watched.run(600, Heartbeat("a step", 5.0)) is None


def test_a_hang_is_seen_wherever_it_is_and_named() -> None:
    for activity in ("a step", "taking grammars", "taking messages in", "checking pages", "sending events", IDLE):
        hang = Watched().run(20, Heartbeat(activity), ages=True)
        assert hang is not None
        assert hang.startswith(f"{activity} does not end, after 10.")


def test_an_activity_with_a_longer_limit_may_use_it() -> None:
    watched = Watched()
    assert watched.run(299, Heartbeat("capturing a graph", 0.0, 300.0), ages=True) is None
    assert watched.run(20, Heartbeat("capturing a graph", 299.0, 300.0), ages=True) is not None


def test_a_silent_engine_beside_a_running_server_hangs() -> None:
    watched = Watched()
    hang = watched.run(20)
    assert hang is not None
    assert hang.startswith("no sign of life for 10.")
    assert Watched().dog.look(Engine(0.0), min_silence=1e9) is None  # importing its libraries, as a new process


def test_a_frozen_host_or_server_kills_no_healthy_engine() -> None:
    watched = Watched()
    watched.run(5, Heartbeat("a step", 0.5))
    watched.clock.advance(3600.0)  # both stood still; nothing was read since
    assert watched.dog.look(watched.engine) is None
    # The first heartbeat after it tells of a step that seems an hour old, then the engine goes on.
    watched.engine.last_sign, watched.engine.heartbeat = watched.clock(), Heartbeat("a step", 3600.5)
    assert watched.dog.look(watched.engine) is None
    assert watched.run(60, Heartbeat("a step", 0.5)) is None
    watched.clock.advance(3600.0)
    assert watched.run(20) is not None  # but one that does not go on is found


def test_a_server_that_freezes_again_and_again_still_finds_a_hang_between() -> None:
    watched = Watched()
    for _ in range(5):
        watched.clock.advance(60.0)
        assert watched.dog.look(watched.engine) is None
    assert watched.run(11) is not None


def test_busy_is_work_within_its_time() -> None:
    watched = Watched()
    engine, dog = watched.engine, watched.dog
    assert dog.busy(engine, 1.0) is None  # idle: it must answer
    engine.heartbeat = Heartbeat("a step", 0.2)
    assert dog.busy(engine, 1.0) == "serving"
    engine.heartbeat = Heartbeat("idle work (Runner.prepare)", 42.0, 300.0)
    assert dog.busy(engine, 1.0) == "idle work (Runner.prepare) for 42.0 s"
    engine.heartbeat = Heartbeat("a step", 42.0)
    assert dog.busy(engine, 1.0) is None
    engine.heartbeat = Heartbeat("a step", 0.2)
    watched.clock.advance(1.5)
    assert dog.busy(engine, 1.0) is None  # an old heartbeat says nothing
