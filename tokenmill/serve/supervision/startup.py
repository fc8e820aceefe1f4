"""What the operator sees while the server starts: phases, a bar on a terminal, then the resolved configuration.

Plain lines where stderr is not a terminal. Knows nothing of what the phases do.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tokenmill.engine.progress import progress_console

PHASES = ("finding the model", "starting the engine", "loading the weights", "warming up", "opening the port")


class StartupReport:
    def __init__(self) -> None:
        console = progress_console()
        self._began = self._phase_began = time.monotonic()
        self._phase = ""
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if console is not None:
            columns = (TextColumn("{task.description:<20}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(PHASES[0], total=len(PHASES))
            self._bar.start()

    def phase(self, name: str) -> None:
        """Begin a phase; reports how long the last one took."""
        now = time.monotonic()
        if self._phase and self._bar is None:
            _say(f"{self._phase}: {now - self._phase_began:.2f} s")
        self._phase, self._phase_began = name, now
        if self._bar is not None and self._task is not None:
            done = PHASES.index(name) if name in PHASES else 0
            self._bar.update(self._task, description=name, completed=done)

    def ready(self, address: str, settings: dict[str, dict[str, Any]]) -> None:
        self.phase("")
        self.stop()
        for title, values in settings.items():
            sources = values.get("sources", {})
            plain = {name: value for name, value in values.items() if name not in (*sources, "sources")}
            _say(f"{title}: {', '.join(f'{name}={_shown(value)}' for name, value in plain.items())}")
            for name, source in sources.items():
                _say(f"  {name}={_shown(values[name])} ({source})")
        _say(f"ready in {time.monotonic() - self._began:.2f} s on {address}")

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return "[" + ",".join(map(str, value)) + "]"
    return "-" if value in (None, "") else str(value)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
