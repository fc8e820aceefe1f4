"""Which group processes have that are ranks: by their devices, and by what this machine has."""

from __future__ import annotations

from tokenmill.hardware.sharding import Grid, Place
from tokenmill.model.group import Group
from tokenmill.runtime.ranks.gloo import GlooGroup
from tokenmill.runtime.ranks.nccl import NcclGroup
from tokenmill.runtime.ranks.shared import SharedGroup, has_exchange, make_memory


def shared_memory(grid: Grid, device: str) -> str:
    """A file for ranks to exchange in, if they do; the caller removes it once all have met."""
    return make_memory(grid) if device == "cpu" and has_exchange() else ""


def make_group(place: Place, meeting: str, timeout: float, device: str, memory: str) -> Group:
    """Returns when all ranks have met."""
    if device == "cuda":
        return NcclGroup(place, meeting, timeout)
    return SharedGroup(place, meeting, timeout, memory) if memory else GlooGroup(place, meeting, timeout)
