"""The adapters that an engine knows by name, and their versions: load, replace and unload while requests run.

A request keeps the version it was submitted with: after a replacement the old version stays until its last request
has ended. Files are read and checked in a thread; the engine's loop calls `poll` between steps, and everything else
from the same thread. Imports no torch: what an adapter is, is known to the functions it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tokenmill.engine.adapters.host import HostStore, Payload
from tokenmill.engine.adapters.residency import AdapterSlots
from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.types import AdapterRef

_log = get_logger(__name__)
MAX_ADAPTERS = 10_000
MAX_NAME = 128
NOT_FOUND, IN_USE, EXISTS = "adapter_not_found", "adapter_in_use", "adapter_exists"


class AdapterError(UserError):
    """`code` is for programs."""

    def __init__(self, problem: str, remedy: str, code: str) -> None:
        super().__init__(problem, remedy)
        self.code = code


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """What an adapter is, without its numbers."""

    name: str
    path: str
    digest: bytes
    rank: int
    nbytes: int
    base: str = ""  # what it was trained on, as it says itself

    @property
    def ref(self) -> AdapterRef:
        return AdapterRef(self.name, self.digest)


Reader = Callable[[str, str], tuple[AdapterVersion, Payload]]  # (name, path) -> an adapter that fits this base
Done = Callable[[AdapterVersion | None, UserError | None], None]


@dataclass(slots=True, eq=False)
class _Job:
    name: str
    future: Future[tuple[AdapterVersion, Payload]]
    replaces: bool
    done: Done


class AdapterRegistry:
    def __init__(self, read: Reader, max_host_bytes: int, max_in_host: int = 0) -> None:
        """Beyond these limits adapters are read from disk again when they are wanted."""
        self._read = read
        self.store = HostStore(self._read_again, max_host_bytes, max_in_host)
        self._sources: dict[bytes, AdapterVersion] = {}  # where each version is read from
        self._slots = AdapterSlots()
        self._count_users: Callable[[bytes], int] = lambda _digest: 0
        self.count_waiting: Callable[[bytes], int] = lambda _digest: 0  # of requests that wait for something else yet
        self._names: dict[str, AdapterVersion] = {}
        self._retired: dict[bytes, list[Done]] = {}  # versions without a name: who waits for their end
        self._jobs: list[_Job] = []
        self._has_changed = False  # since `poll` was last called
        self._pool = ThreadPoolExecutor(1, "adapter-loader")

    def attach(self, slots: AdapterSlots, count_users: Callable[[bytes], int]) -> None:
        """`count_users`: of a version, the sequences that wait or run."""
        self._slots = slots
        self._count_users = count_users

    # --- what there is ---

    def find(self, name: str) -> AdapterRef:
        return self._find(name).ref

    def knows(self, ref: AdapterRef) -> bool:
        """Whether requests of this version can be computed."""
        return ref.digest in self._sources

    def versions(self) -> list[AdapterVersion]:
        return list(self._names.values())

    # --- changes ---

    def load_now(self, name: str, path: str, replaces: bool = False) -> AdapterVersion:
        """Read, check and register an adapter; blocks."""
        self._check_new(name, replaces)
        return self._enter(*self._read(name, path))

    def load(self, name: str, path: str, replaces: bool, done: Done) -> None:
        """The same beside the loop: `done` is called by `poll`, with the version or what was wrong."""
        try:
            self._check_new(name, replaces)
        except UserError as error:
            done(None, error)
            return
        self._jobs.append(_Job(name, self._pool.submit(self._read, name, path), replaces, done))

    def unload(self, name: str, drains: bool = False, done: Done | None = None) -> None:
        """Forget an adapter that nobody uses. `drains`: take no new requests, and forget it when the last has ended;
        `done` is called then."""
        version = self._find(name)
        users = self._num_users(version.digest)
        shared = sum(each.digest == version.digest for each in self._names.values()) > 1
        if users and not drains and not shared:
            raise AdapterError(
                f"adapter '{name}' is in use by {users} requests",
                "unload it when they have ended, or let it drain",
                IN_USE,
            )
        del self._names[name]
        self._retire(version, done)

    def poll(self) -> Iterator[tuple[bytes, UserError]]:
        """Take in what was read and let go of what is over. Yields versions whose requests must be refused."""
        self._has_changed = False
        for job in [each for each in self._jobs if each.future.done()]:
            self._jobs.remove(job)
            self._finish(job)
        for digest in list(self._retired):
            self._release(digest)
        for digest, error in list(self._slots.failures.items()):
            yield digest, error
            self._slots.failures.pop(digest, None)

    @property
    def is_busy(self) -> bool:
        """Whether `poll` may have something to do, or gauges something to tell."""
        return bool(self._jobs or self._retired or self._slots.failures or self._has_changed)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.store.close()
        self.attach(AdapterSlots(), lambda _digest: 0)  # no circle is left that keeps the weights

    # --- how ---

    def _num_users(self, digest: bytes) -> int:
        return self._count_users(digest) + self.count_waiting(digest)

    def _find(self, name: str) -> AdapterVersion:
        version = self._names.get(name)
        if version is None:
            known = ", ".join(sorted(self._names)[:20]) or "none"
            raise AdapterError(f"adapter '{name}' is not loaded", f"loaded: {known}", NOT_FOUND)
        return version

    def _check_new(self, name: str, replaces: bool) -> None:
        check_name(name)
        if name in self._names and not replaces:
            raise AdapterError(
                f"adapter '{name}' has already been loaded", "unload it first, or load it with load_inplace", EXISTS
            )
        if name not in self._names and len(self._names) + len(self._jobs) >= MAX_ADAPTERS:
            raise UserError(f"{MAX_ADAPTERS} adapters are loaded", "unload one first")

    def _finish(self, job: _Job) -> None:
        try:
            version, payload = job.future.result()
            self._check_new(job.name, job.replaces)  # another of that name may have come meanwhile
        except UserError as error:
            job.done(None, error)
        except Exception as error:  # of the reader: it must not end the engine
            _log.exception("adapter '%s' could not be read", job.name)
            job.done(None, UserError(f"adapter '{job.name}' could not be read: {error}", "check its files"))
        else:
            job.done(self._enter(version, payload), None)

    def _enter(self, version: AdapterVersion, payload: Payload) -> AdapterVersion:
        self._has_changed = True
        before = self._names.get(version.name)
        self._names[version.name] = self._sources[version.digest] = version
        self.store.keep(version.digest, payload)
        if before is not None and before.digest != version.digest:
            self._retire(before)
        self.store.stats.num_adapters = len(self._names)
        _log.info(
            "adapter '%s': rank %d, %.1f MiB, %s", version.name, version.rank, version.nbytes / 2**20, version.path
        )
        return version

    def _retire(self, version: AdapterVersion, done: Done | None = None) -> None:
        self._retired.setdefault(version.digest, []).extend([done] if done is not None else [])
        self._release(version.digest)
        self.store.stats.num_adapters = len(self._names)

    def _release(self, digest: bytes) -> None:
        """Give back the memory of a retired version once nobody uses it; one that has a name again stays."""
        named = next((each for each in self._names.values() if each.digest == digest), None)
        if named is None and self._num_users(digest):
            return
        self._has_changed = True
        waiting = self._retired.pop(digest)
        if named is not None:
            self._sources[digest] = named  # the directory of the other name may go with it
        else:
            self._slots.drop(digest)
            self.store.drop(digest)
            self._sources.pop(digest, None)
        for done in waiting:
            done(None, None)

    def _read_again(self, digest: bytes) -> Payload:
        """In the thread of the host store."""
        known = self._sources[digest]
        version, payload = self._read(known.name, known.path)
        if version.digest != digest:
            raise UserError(
                f"the files of adapter '{known.name}' in {known.path} have changed since it was loaded",
                "load it again, from a directory of its own",
            )
        return payload


def check_name(name: str) -> None:
    if not (0 < len(name) <= MAX_NAME and name.isprintable() and not any(each in name for each in "=,\"'\\")):
        raise UserError(
            f"'{name[:MAX_NAME]}' cannot be the name of an adapter",
            f"give 1 to {MAX_NAME} printable characters without quotes, commas and '='",
        )


def split_option(text: str) -> tuple[str, str]:
    """(name, path) of NAME=DIR; a directory alone is served under its own name."""
    name, equals, path = text.partition("=")
    if not equals:
        path, name = text, text.rstrip("/").rpartition("/")[2]
    check_name(name)
    if not path:
        raise UserError(f"adapter '{name}' has no directory", "write NAME=DIR")
    return name, path
