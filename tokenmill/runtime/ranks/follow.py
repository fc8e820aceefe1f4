"""What every rank but the first does, as a process or as a thread: load its part of the model, then obey."""

from __future__ import annotations

from pathlib import Path

from tokenmill.checkpoint.open import open_source
from tokenmill.config import ResolvedConfig
from tokenmill.runtime.build import build_runtime
from tokenmill.runtime.ranks.duties import RankDuties
from tokenmill.runtime.ranks.follower import Follower
from tokenmill.runtime.ranks.nccl import device_of
from tokenmill.runtime.ranks.seat import Seat


def follow(model: Path, config: ResolvedConfig, seat: Seat) -> None:
    runtime = build_runtime(open_source(model, config.load_format), config, device_of(config.device, seat.place), seat)
    assert isinstance(runtime.executor, RankDuties)
    assert seat.link is not None
    Follower(runtime.executor, seat).run(seat.link)
