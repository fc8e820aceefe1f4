"""The disk tier: what it keeps is right or not there, across restarts, full disks, other models and killed writers."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.engine.kv.test_guarded_tier import leaving, until
from tokenmill.engine.kv.tier.disk import DiskTier
from tokenmill.engine.kv.tier.entry import HEADER_BYTES, EntryCodec, RejectedEntryError
from tokenmill.engine.kv.tier.guard import GuardedTier
from tokenmill.engine.kv.tier.secret import own_secret, read_secret
from tokenmill.errors import UserError

MODEL, OTHER = b"m" * 16, b"o" * 16
SECRET = b"a secret of the deployment"
SIZE = 1000
HOUR = 3600 * 10**9


def page(seed: int) -> memoryview:
    return memoryview(bytearray((seed * 7 + place) % 256 for place in range(SIZE)))


def key(number: int) -> bytes:
    return number.to_bytes(16, "big") + b"\x00"


def open_tier(folder: Path, pages: int = 10, identity: bytes = MODEL, secret: bytes = b"") -> DiskTier:
    tier = DiskTier(folder, pages * (SIZE + HEADER_BYTES), identity, SIZE, secret)
    tier.open()
    return tier


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.kv") if path.is_file())


def rejection(codec: EntryCodec, data: bytes | bytearray, name: bytes) -> str:
    with pytest.raises(RejectedEntryError) as rejected:
        codec.decode(bytearray(data), name)
    return rejected.value.reason


def test_an_entry_says_what_it_is() -> None:
    codec = EntryCodec(SECRET, MODEL, SIZE)
    entry = bytearray(codec.header(key(1), page(1))) + page(1)
    assert codec.decode(entry, key(1)) == page(1)
    assert rejection(codec, entry, key(2)) == "name"
    assert rejection(EntryCodec(SECRET, OTHER, SIZE), entry, key(1)) == "layout"
    assert rejection(EntryCodec(SECRET, MODEL, SIZE + 1), entry, key(1)) == "length"
    for place in range(len(entry)):  # every single byte counts
        damaged = bytearray(entry)
        damaged[place] ^= 1
        assert rejection(codec, damaged, key(1)) in ("version", "layout", "name", "length", "hash")
    for length in (0, 10, HEADER_BYTES, len(entry) - 1):
        assert rejection(codec, entry[:length], key(1)) == "length"
    assert rejection(codec, entry + b"x", key(1)) == "length"


def test_without_the_secret_no_entry_can_be_made() -> None:
    """Not even by someone who knows everything else: the fields that are no secret are copied from a real entry."""
    codec, forger = EntryCodec(SECRET, MODEL, SIZE), EntryCodec(b"a guess, long enough", MODEL, SIZE)
    assert forger.namespace != codec.namespace
    genuine = codec.header(key(1), page(1))
    forged = bytearray(genuine[:-32] + forger.header(key(1), page(2))[-32:]) + page(2)
    assert rejection(codec, forged, key(1)) == "hash"
    assert rejection(codec, bytearray(genuine) + page(2), key(1)) == "hash"


def test_pages_survive_a_restart(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for number in range(5):
        tier.put(key(number), page(number))
    again = open_tier(tmp_path)
    assert again.has([key(3), key(9)]) == [True, False]
    assert again.get(key(3)) == page(3)
    assert again.get(key(9)) is None
    assert (again.stats.entries, again.stats.hits, again.stats.misses) == (5, 1, 1)
    assert again.stats.bytes == 5 * (SIZE + HEADER_BYTES) == sum(path.stat().st_size for path in files(tmp_path))


def test_what_was_read_longest_ago_makes_room_also_after_a_restart(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, pages=3)
    for number in range(3):
        tier.put(key(number), page(number))
    for number, path in enumerate(sorted(files(tmp_path), key=lambda each: each.name)):
        os.utime(path, (number, number))
    again = open_tier(tmp_path, pages=3)
    assert again.get(key(0)) == page(0)  # the oldest file, but read just now
    again.put(key(7), page(7))
    assert again.has([key(0), key(1), key(2), key(7)]) == [True, False, True, True]
    smaller = open_tier(tmp_path, pages=1)
    assert smaller.stats.entries == 1
    assert smaller.get(key(7)) == page(7)


def test_pages_of_another_model_or_secret_are_never_used_nor_deleted(tmp_path: Path) -> None:
    others = [
        open_tier(tmp_path, identity=OTHER, secret=SECRET),
        open_tier(tmp_path, secret=b"another one, long enough"),
    ]
    for other in others:
        other.put(key(1), page(1))
    tier = open_tier(tmp_path, secret=SECRET)
    assert tier.stats.entries == 2
    assert tier.has([key(1)]) == [False]
    assert tier.get(key(1)) is None
    assert len(files(tmp_path)) == 2
    # Somebody renames a file: its header still says whose it is.
    foreign = next(path for path in files(tmp_path) if path.name.startswith(others[0]._codec.namespace.hex()))
    foreign.rename(foreign.with_name(tier._file_name(key(1))))
    tier.refresh()
    assert tier.has([key(1)]) == [True]
    assert tier.get(key(1)) is None
    assert tier.stats.rejected == {"layout": 1}
    assert len(files(tmp_path)) == 1
    assert others[1].get(key(1)) == page(1)


def flip(data: bytes) -> bytes:
    return data[:-3] + bytes(each ^ 1 for each in data[-3:])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(lambda data: data[:-1], "length"), (lambda data: data[:0], "length"), (lambda data: data * 2, "length"),
     (flip, "hash"), (lambda data: b"x" + data[1:], "version")],
    ids=["cut", "empty", "long", "page", "magic"],
)  # fmt: skip
def test_a_damaged_file_is_counted_and_deleted(tmp_path: Path, damage: Callable[[bytes], bytes], reason: str) -> None:
    open_tier(tmp_path).put(key(1), page(1))
    (path,) = files(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    tier = open_tier(tmp_path)
    assert tier.get(key(1)) is None
    assert (tier.stats.rejected, tier.stats.entries, tier.stats.bytes) == ({reason: 1}, 0, 0)
    assert not files(tmp_path)
    tier.put(key(1), page(1))
    assert tier.get(key(1)) == page(1)


def test_an_entry_under_another_name_is_refused(tmp_path: Path) -> None:
    """Swapped and copied entries are genuine bytes of this deployment, but not of this page."""
    tier = open_tier(tmp_path)
    for number in range(3):
        tier.put(key(number), page(number))
    paths = [tier._path(tier._file_name(key(number))) for number in range(4)]
    contents = [path.read_bytes() for path in paths[:3]]
    paths[0].write_bytes(contents[1])
    paths[1].write_bytes(contents[0])
    paths[3].write_bytes(contents[2])
    tier.refresh()
    assert [tier.get(key(number)) for number in (0, 1, 3)] == [None, None, None]
    assert tier.stats.rejected == {"name": 3}
    assert tier.get(key(2)) == page(2)
    paths[2].unlink()
    paths[2].write_bytes(contents[2])  # replayed in its own place: it is what it says
    assert tier.get(key(2)) == page(2)


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.put(key(1), page(1))
    (path,) = files(tmp_path)
    path.unlink()
    os.mkfifo(path)  # reading it would wait for a writer
    assert tier.get(key(1)) is None
    path.symlink_to("/dev/zero")
    assert tier.get(key(1)) is None
    assert tier.stats.rejected == {"file": 2}
    assert not path.is_symlink()


def test_two_engines_share_a_directory(tmp_path: Path) -> None:
    first, second = open_tier(tmp_path), open_tier(tmp_path)
    first.put(key(1), page(1))
    second.refresh()
    assert second.has([key(1)]) == [True]
    assert second.get(key(1)) == page(1)
    second.put(key(1), page(1))
    assert second.stats.written_bytes == 0, "it is there already"
    for path in files(tmp_path):
        path.unlink()  # the other one trims
    assert first.get(key(1)) is None
    assert not first.holds(key(1))
    second.refresh()
    assert (second.stats.entries, second.stats.bytes) == (0, 0)


def test_what_another_process_read_stays(tmp_path: Path) -> None:
    """Each process has its own order; the files have the common one."""
    first, second = open_tier(tmp_path, pages=3), open_tier(tmp_path, pages=3)
    for number in range(3):
        first.put(key(number), page(number))
    for number, path in enumerate(files(tmp_path)):
        os.utime(path, (number, number))
    for tier in (first, second):
        tier._files.clear()
        tier._scanned.clear()
        tier.refresh()
    assert second.get(key(0)) == page(0)
    first.put(key(5), page(5))
    assert [tier.get(key(number)) is not None for tier in (first, second) for number in (0, 1)] == [True, False] * 2
    second.refresh()
    assert first.stats.bytes == second.stats.bytes == 3 * (SIZE + HEADER_BYTES)


def test_a_start_leaves_files_in_progress_alone(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.put(key(1), page(1))
    subfolder = files(tmp_path)[0].parent
    fresh, old = subfolder / f"{os.getpid()}-0.part", subfolder / "0123456789abcdef-7.part"
    for path in (fresh, old):
        path.write_bytes(b"half")
    os.utime(old, ns=(0, time.time_ns() - HOUR - 10**9))
    open_tier(tmp_path)
    assert fresh.exists(), "its writer may be in another container"
    assert not old.exists(), "its writer is dead"


def test_writers_use_names_of_their_own(tmp_path: Path) -> None:
    """Also with the same process id, as in two containers."""
    names = {open_tier(tmp_path)._writer for _ in range(20)}
    assert len(names) == 20


def test_a_generated_secret_is_private_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "below" / "secret"
    first = own_secret(path)
    assert own_secret(path) == first
    assert len(first) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["secret"]
    path.chmod(0o644)
    with pytest.raises(OSError, match="private"):
        own_secret(path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        own_secret(path)


def test_a_given_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(UserError, match="cannot be read"):
        read_secret(path)
    path.write_text("short")
    with pytest.raises(UserError, match="at least 16"):
        read_secret(path)
    path.write_text("0123456789abcdef0123\n")
    assert read_secret(path) == b"0123456789abcdef0123"


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The operating system refuses to write more than this to a file, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_pages_not_requests(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, pages=100)
    tier.put(key(1), page(1))
    with largest_file(SIZE // 2), pytest.raises(OSError, match="too large"):
        tier.put(key(2), page(2))
    assert tier.get(key(1)) == page(1)
    assert tier.get(key(2)) is None
    assert len(list(tmp_path.rglob("*.*"))) == 1, "nothing half written is left"
    tier.put(key(2), page(2))
    assert tier.get(key(2)) == page(2)


def test_a_place_that_cannot_be_written_is_off_until_it_can(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("x")
    now = [10.0]
    tier = DiskTier(tmp_path / "file" / "below", 100 * SIZE, MODEL, SIZE)
    guarded = GuardedTier(tier, SIZE, lambda: now[0])
    until(lambda: tier.stats.failures == 1)
    assert not guarded.wants(key(1))
    assert guarded.local([key(1)]) == [False]
    (tmp_path / "file").unlink()
    now[0] += 1.0
    assert guarded.wait_open(20.0)
    guarded.put(key(1), leaving(SIZE), 0)
    until(lambda: guarded.num_queued == 0)
    assert guarded.local([key(1)]) == [True]
    assert len(guarded.get([key(1)])) == 1
    assert "cannot open" in caplog.text
    guarded.end()
    guarded.join(time.monotonic() + 10.0)


def test_a_size_below_one_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="less than one page"):
        DiskTier(tmp_path, SIZE, MODEL, SIZE)


_KILLED_WRITERS = """
import os, random, signal, sys, time
from pathlib import Path
from tokenmill.engine.kv.tier.disk import DiskTier
folder, size = Path(sys.argv[1]), 50_000
def page(n): return memoryview(bytearray([n % 251]) * size)
def key(n): return n.to_bytes(16, "big") + b"\\0"
draw = random.Random(1)
seen = killed_at_work = 0
for life in range(100):
    begun, begins = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(begins, b".")
        tier = DiskTier(folder, 20 * size, b"m" * 16, size)
        tier.open()
        number = life * 1000
        while True:
            tier.put(key(number), page(number))
            number += 1
    os.read(begun, 1)  # on a busy machine a child has to wait for its turn
    os.close(begun)
    os.close(begins)
    time.sleep(draw.uniform(0.001, 0.02))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    killed_at_work += any(folder.rglob("*.part"))
    later = time.time_ns() + 3601 * 10**9
    tier = DiskTier(folder, 20 * size, b"m" * 16, size, clock=lambda: later)
    tier.open()
    assert not list(folder.rglob("*.part")), "a dead writer's file is left"
    for path in folder.rglob("*.kv"):
        name = bytes.fromhex(path.stem.split("-")[1])
        data = tier.get(name)
        assert data == page(int.from_bytes(name[:16], "big")), "a page is not what was written"
        seen += 1
    assert not tier.stats.rejected
    assert tier.stats.bytes <= 20 * size
print(seen, killed_at_work)
"""


def test_a_hundred_killed_writers_leave_nothing_wrong(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _KILLED_WRITERS, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    seen, killed_at_work = map(int, run.stdout.split())
    assert seen > 100
    assert killed_at_work > 0, "no writer was killed in the middle of a file: the test shows nothing"
