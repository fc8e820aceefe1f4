"""What is said beside a result while it is made: progress bars and quiet notes, on stderr and on a terminal only.

A bar is gone when the work is done. Knows nothing of the work. Called by the verbs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields the function to tell how many of how many are done; starting over begins the bar anew."""
    from tokenmill.engine.progress import progress_console

    console = progress_console()
    if console is None:
        yield lambda _done, _total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(what, total=None)
        last = 0

        def advance(done: int, total: int) -> None:
            nonlocal last
            if done < last:
                progress.reset(bar, total=total)
            last = done
            progress.update(bar, completed=done, total=total)

        yield advance


def print_note(text: str) -> None:
    """A quiet line about a result, not part of it."""
    if sys.stderr.isatty():
        from rich.console import Console

        Console(stderr=True, highlight=False).print(text, style="dim", markup=False, soft_wrap=True)
