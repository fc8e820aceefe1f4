"""What the user sees while bytes arrive: a bar on a terminal, plain lines elsewhere, always on stderr.

Knows nothing about where bytes come from. Used by packages.py, pull.py and hub.py.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any


def wants_bar(progress: bool | None) -> bool:
    return progress is not False and sys.stderr.isatty() and not os.environ.get("TQDM_DISABLE")


class Progress:
    """Use as a context manager; `start` opens the bar, `advance` moves it, `say` writes a line."""

    def __init__(self, progress: bool | None) -> None:
        self._silent = progress is False
        self._bar: Any = _rich_bar() if wants_bar(progress) else None
        self._task: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._bar.stop()

    def start(self, title: str, total: int, done: int) -> None:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(title, total=total, completed=done)

    def advance(self, count: int) -> None:
        """`count` is negative when bytes had to be thrown away."""
        if self._task is not None:
            self._bar.advance(self._task, count)

    def say(self, text: str) -> None:
        """Write one line, unless a bar shows the same."""
        if self._task is None and not self._silent:
            print(text, file=sys.stderr, flush=True)


def _rich_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return RichProgress(*columns, console=Console(stderr=True))
