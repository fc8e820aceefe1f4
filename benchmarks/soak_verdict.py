"""What soak.py --chaos concludes: resident memory over time by process, and the table of checks with their limits."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PAGE = 4096
_SETTLED = 10.0  # seconds after which a new engine has touched all of its KV cache


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    measured: str
    limit: str
    ok: bool


@dataclass(slots=True)
class MemorySeries:
    """Resident bytes of the server, of its engine, and of all other children together."""

    began: float = field(default_factory=time.monotonic)
    server: list[tuple[float, int]] = field(default_factory=list)
    engine: list[tuple[float, int]] = field(default_factory=list)
    others: list[tuple[float, int]] = field(default_factory=list)
    processes: list[int] = field(default_factory=list)
    _engine_pid: int = 0
    _engine_seen: float = 0.0

    def sample(self, server: int, engine: int) -> None:
        now = time.monotonic()
        moment = now - self.began
        if engine != self._engine_pid:
            self._engine_pid, self._engine_seen = engine, now
        children = [pid for pid in descendants(server) if pid != engine]
        self.server.append((moment, resident(server)))
        self.others.append((moment, sum(map(resident, children))))
        self.processes.append(1 + len(children) + bool(engine))
        size = resident(engine) if engine else 0
        if size and now - self._engine_seen >= _SETTLED:
            self.engine.append((moment, size))


def growth(series: list[tuple[float, int]], start: float, end: float) -> float | None:
    """Median of the last quarter of the time from `start` to `end` over that of the first, minus one."""
    quarter = (end - start) / 4
    first = [size for moment, size in series if start <= moment < start + quarter]
    last = [size for moment, size in series if end - quarter <= moment <= end]
    return statistics.median(last) / statistics.median(first) - 1 if first and last else None


def by_minute(series: list[tuple[float, int]]) -> list[float]:
    """Median of each minute that has samples, in MiB."""
    minutes: dict[int, list[int]] = {}
    for moment, size in series:
        minutes.setdefault(int(moment // 60), []).append(size)
    return [round(statistics.median(sizes) / 2**20, 1) for _, sizes in sorted(minutes.items())]


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def descendants(pid: int) -> list[int]:
    """Children of a process and theirs."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found: list[int] = []
    next_ones = [pid]
    while next_ones:
        next_ones = [child for each in next_ones for child in children.get(each, [])]
        found += next_ones
    return found


def table(checks: list[Check]) -> str:
    rows = [("check", "measured", "limit", "")]
    rows += [(each.name, each.measured, each.limit, "ok" if each.ok else "FAILED") for each in checks]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def as_json(checks: list[Check]) -> dict[str, Any]:
    return {check.name: {"measured": check.measured, "limit": check.limit, "ok": check.ok} for check in checks}
