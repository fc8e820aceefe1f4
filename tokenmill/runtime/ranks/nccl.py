"""Ranks as processes with a GPU each, which put their results together by torch.distributed's NCCL.

Ranks that share every layer only: messages between stages would have to be ordered against each other on one
communicator. Never run yet: docs/ranks.md lists what could not be.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from tokenmill.hardware.sharding import Place
from tokenmill.model.group import Group, RankError
from tokenmill.runtime.ranks.gloo import MEETING_SECONDS, first_line, gathered

dist: Any = torch.distributed  # its annotations lack stores and what process groups do


def device_of(kind: str, place: Place) -> torch.device:
    """Rank n has the n-th of the GPUs that the process may see."""
    return torch.device("cuda", place.rank) if kind == "cuda" else torch.device(kind)


class NcclGroup(Group):
    def __init__(self, place: Place, meeting: str, timeout: float) -> None:
        """As GlooGroup takes them."""
        self.size, self.part = place.team_size, place.part
        torch.cuda.set_device(device_of("cuda", place))
        store = dist.FileStore(meeting, place.grid.size)
        store.set_timeout(timedelta(seconds=max(timeout, MEETING_SECONDS)))
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        team = dist.PrefixStore(f"stage {place.stage}", store)
        try:
            self._team = dist.ProcessGroupNCCL(team, self.part, self.size, options)
        except RuntimeError as error:
            raise RankError(f"ranks did not meet: {first_line(error)}") from None

    def collect(self, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
        return gathered(self._team, x, widths)

    def send(self, x: Tensor, rank: int, number: int) -> None:  # noqa: ARG002
        raise AssertionError("GPUs as ranks have no other stage")

    def receive(self, shape: Sequence[int], rank: int, number: int) -> Tensor:  # noqa: ARG002
        raise AssertionError("GPUs as ranks have no other stage")
