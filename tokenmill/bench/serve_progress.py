"""A progress bar over requests, on a terminal only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tokenmill.bench.serve_client import Sample
from tokenmill.bench.serve_job import ServeJob
from tokenmill.engine.progress import progress_console


@contextlib.contextmanager
def progress_of(job: ServeJob) -> Iterator[Callable[[Sample], None]]:
    """Gives what to call as each request ends."""
    console = None if job.disable_tqdm else progress_console()
    if console is None:
        yield lambda _: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("requests", total=job.num_prompts)
        failed = 0

        def on_done(sample: Sample) -> None:
            nonlocal failed
            failed += not sample.ok
            progress.update(task, advance=1, description=f"requests ({failed} failed)" if failed else "requests")

        yield on_done
