"""A progress bar over requests: on a terminal, if wanted and not switched off; nothing elsewhere.

`rich` is imported only when a bar is shown: a bare host runs the engine without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def progress_console() -> Console | None:
    """None where a bar would only clutter a log: not a terminal, or bars switched off by TQDM_DISABLE."""
    if os.environ.get("TQDM_DISABLE", "") not in ("", "0") or not sys.stderr.isatty():
        return None
    from rich.console import Console

    return Console(stderr=True)


@contextmanager
def request_bar(total: int, wanted: bool) -> Iterator[Callable[[], None]]:
    """Yields the function to call for each finished request."""
    console = progress_console() if wanted else None
    if console is None:
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("requests", total=total)
        yield lambda: progress.advance(task)
