"""Ranks as processes that exchange tensors by torch.distributed's gloo, between the CPUs of one host.

The process groups are objects of their own: torch's global group stays free for whoever embeds the engine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from tokenmill.hardware.sharding import Place
from tokenmill.model.group import Group, RankError

dist: Any = torch.distributed  # its annotations lack stores and what process groups do
MEETING_SECONDS = 60.0  # for all ranks to find each other, on a busy machine
_INTERFACE = "GLOO_SOCKET_IFNAME"


class GlooGroup(Group):
    def __init__(self, place: Place, meeting: str, timeout: float) -> None:
        """`meeting`: a file that all ranks can write to, new for every grid. `timeout`: seconds after which a rank that
        does not come to an exchange counts as lost."""
        grid = place.grid
        self.size, self.part = place.team_size, place.part
        self._sent: list[tuple[Any, Tensor]] = []
        store = dist.FileStore(meeting, grid.size)
        store.set_timeout(timedelta(seconds=max(timeout, MEETING_SECONDS)))
        limit, chosen = timedelta(seconds=timeout), os.environ.get(_INTERFACE)
        os.environ.setdefault(_INTERFACE, "lo")  # all ranks are on this host, whatever it calls itself
        try:
            team = dist.PrefixStore(f"stage {place.stage}", store)
            self._team = dist.ProcessGroupGloo(team, place.part, self.size, limit)
            self._all = dist.ProcessGroupGloo(dist.PrefixStore("all", store), place.rank, grid.size, limit)
        except RuntimeError as error:
            raise RankError(f"ranks did not meet: {first_line(error)}") from None
        finally:
            if chosen is None:
                del os.environ[_INTERFACE]

    def collect(self, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
        return gathered(self._team, x, widths)

    def send(self, x: Tensor, rank: int, number: int) -> None:
        x = x.contiguous()
        self._sent.append((self._all.send([x], rank, number), x))  # its memory is read until then

    def release(self) -> None:
        self._sent = [(work, x) for work, x in self._sent if not work.is_completed()]

    def receive(self, shape: Sequence[int], rank: int, number: int) -> Tensor:
        x = torch.empty(tuple(shape))
        try:
            self._all.recv([x], rank, number).wait()
        except RuntimeError as error:
            raise RankError(f"receiving from rank {rank} failed: {first_line(error)}") from None
        return x


def gathered(team: Any, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """As Group.collect, by a process group of torch: all parts as wide as the widest."""
    widest = max(widths)
    x = x.contiguous() if x.shape[-1] == widest else torch.nn.functional.pad(x, (0, widest - x.shape[-1]))
    parts = [torch.empty_like(x) for _ in widths]
    try:
        team.allgather([parts], [x]).wait()
    except RuntimeError as error:
        raise RankError(f"an exchange failed: {first_line(error)}") from None
    return [part[..., :width] for part, width in zip(parts, widths, strict=True)]


def first_line(error: RuntimeError) -> str:
    """Without the place in torch's sources that it begins with."""
    return str(error).splitlines()[0].rpartition("] ")[2][:120]
