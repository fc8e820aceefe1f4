"""The disk tier: what it keeps is right or not there, across restarts, full disks, other models and killed writers."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tokenmill.engine.kv.tier.disk import DiskTier
from tokenmill.engine.kv.tier.entry import (
    HEADER_BYTES,
    CorruptEntryError,
    ForeignEntryError,
    decode,
    encode_header,
)
from tokenmill.errors import UserError

MODEL, OTHER = b"m" * 16, b"o" * 16
SIZE = 1000


def page(seed: int) -> memoryview:
    return memoryview(bytearray((seed * 7 + place) % 256 for place in range(SIZE)))


def key(number: int) -> bytes:
    return number.to_bytes(16, "big") + b"\x00"


def open_tier(folder: Path, pages: int = 10, identity: bytes = MODEL) -> DiskTier:
    return DiskTier(folder, pages * (SIZE + HEADER_BYTES), identity, SIZE)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_an_entry_says_what_it_is() -> None:
    entry = bytearray(encode_header(MODEL, key(1), page(1))) + page(1)
    assert decode(entry, MODEL, key(1)) == page(1)
    for identity, name in ((OTHER, key(1)), (MODEL, key(2))):
        with pytest.raises(ForeignEntryError):
            decode(entry, identity, name)
    for place in range(len(entry)):  # every single byte counts
        damaged = bytearray(entry)
        damaged[place] ^= 1
        with pytest.raises(CorruptEntryError):
            decode(damaged, MODEL, key(1))
    for length in (0, 10, HEADER_BYTES, len(entry) - 1):
        with pytest.raises(CorruptEntryError):
            decode(entry[:length], MODEL, key(1))


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
    assert [bool(each) for each in again.has([key(0), key(1), key(2), key(7)])] == [True, False, True, True]
    smaller = open_tier(tmp_path, pages=1)
    assert smaller.stats.entries == 1
    assert smaller.get(key(7)) == page(7)


def test_pages_of_another_model_are_counted_and_never_used(tmp_path: Path) -> None:
    open_tier(tmp_path, identity=OTHER).put(key(1), page(1))
    tier = open_tier(tmp_path)
    assert tier.stats.foreign == 1
    assert tier.has([key(1)]) == [False]
    # Somebody renames the file: its header still says whose it is.
    (foreign,) = files(tmp_path)
    foreign.rename(foreign.with_name(foreign.name.replace(OTHER.hex(), MODEL.hex())))
    assert tier.has([key(1)]) == [True]
    assert tier.get(key(1)) is None
    assert (tier.stats.foreign, tier.stats.corrupt) == (2, 0)
    assert not files(tmp_path)


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:0], lambda data: data[:-3] + b"xyz"])
def test_a_damaged_file_is_counted_and_deleted(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    open_tier(tmp_path).put(key(1), page(1))
    (path,) = files(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    tier = open_tier(tmp_path)
    assert tier.get(key(1)) is None
    assert (tier.stats.corrupt, tier.stats.entries, tier.stats.bytes) == (1, 0, 0)
    assert not files(tmp_path)
    tier.put(key(1), page(1))
    assert tier.get(key(1)) == page(1)


def test_two_engines_share_a_directory(tmp_path: Path) -> None:
    first, second = open_tier(tmp_path), open_tier(tmp_path)
    first.put(key(1), page(1))
    assert second.has([key(1)]) == [True]
    assert second.get(key(1)) == page(1)
    for path in files(tmp_path):
        path.unlink()  # the other one trims
    assert first.get(key(1)) is None
    assert not first.holds(key(1))


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The operating system refuses to write more than this to a file, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_pages_not_requests(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    tier = DiskTier(tmp_path, 100 * SIZE, MODEL, SIZE, clock=lambda: now[0])
    tier.put(key(1), page(1))
    with largest_file(SIZE // 2):
        tier.put(key(2), page(2))
        tier.put(key(3), page(3))  # not even tried
    assert tier.stats.failures == 1
    assert "cannot write" in caplog.text
    assert tier.get(key(1)) == page(1)
    assert tier.get(key(2)) is None
    assert len(files(tmp_path)) == 1
    now[0] = 60.0
    tier.put(key(2), page(2))
    assert tier.get(key(2)) == page(2)
    assert "takes pages again" in caplog.text


def test_a_place_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file" / "below", Path("/proc/tokenmill")):
        with pytest.raises(UserError, match="cannot be used"):
            open_tier(folder)
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
    tier = DiskTier(folder, 20 * size, b"m" * 16, size)
    assert not list(folder.rglob("*.part")), "a dead writer's file is left"
    for path in folder.rglob("*.kv"):
        name = bytes.fromhex(path.stem.split("-")[1])
        data = tier.get(name)
        assert data == page(int.from_bytes(name[:16], "big")), "a page is not what was written"
        seen += 1
    assert tier.stats.corrupt == tier.stats.failures == 0
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
