"""Files by owner: who sees them, how much room they have, what a kill at any write leaves."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.unit.serve.killed_disk import KilledDisk, KilledError
from tokenmill.errors import UserError
from tokenmill.serve.errors import ApiError
from tokenmill.serve.files import disk as disk_module
from tokenmill.serve.files import store as store_module
from tokenmill.serve.files.store import FileRecord, FileStore


def add(store: FileStore, owner: str, content: bytes, num_keys: int = 1, seconds: int | None = None) -> FileRecord:
    upload = store.upload(owner, num_keys)
    try:
        upload.write(content)
        return upload.commit("name.jsonl", "batch", seconds)
    finally:
        upload.abort()


def test_an_owner_sees_its_own_files_only_and_finds_them_after_a_restart(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path), 1 << 20)
    first, second = add(store, "a", b"one"), add(store, "a", b"two!")
    other = add(store, "b", b"three")
    store.close()
    store = FileStore(str(tmp_path), 1 << 20)
    assert {each.id for each in store.listed("a")} == {first.id, second.id}
    assert store.path("a", second.id).read_bytes() == b"two!"
    assert (store.used("a"), store.used("b"), store.used("c")) == (7, 5, 0)
    for owner, file_id in (("b", first.id), ("c", other.id), ("a", "../lock"), ("a", "")):
        with pytest.raises(ApiError) as caught:
            store.find(owner, file_id)
        assert caught.value.status == 404
        with pytest.raises(ApiError):
            store.delete(owner, file_id)
    store.delete("a", first.id)
    assert [each.id for each in store.listed("a")] == [second.id]
    assert store.used("a") == 4
    assert not any(oct(path.stat().st_mode & 0o077) != "0o0" for path in tmp_path.rglob("*"))
    store.close()


def test_each_key_has_its_part_of_the_room(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path), 100)
    with pytest.raises(ApiError) as caught:
        add(store, "a", b"x" * 51, num_keys=2)
    assert (caught.value.status, caught.value.code) == (413, "files_full")
    kept = add(store, "a", b"x" * 30, num_keys=2)
    open_upload = store.upload("a", 2)
    open_upload.write(b"x" * 15)  # unfinished uploads count
    with pytest.raises(ApiError):
        add(store, "a", b"x" * 6, num_keys=2)
    open_upload.abort()
    add(store, "a", b"x" * 20, num_keys=2)
    add(store, "b", b"x" * 50, num_keys=2)
    store.delete("a", kept.id)
    add(store, "a", b"x" * 30, num_keys=2)
    assert not list(tmp_path.rglob("*.part"))
    store.close()


def test_a_full_disk_leaves_no_part_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _data: bytes) -> None:
        raise OSError(28, "No space left on device")

    store = FileStore(str(tmp_path), 1 << 20)
    add(store, "a", b"before")
    with monkeypatch.context() as patched:
        patched.setattr(disk_module, "write_all", full)
        with pytest.raises(OSError, match="No space"):
            store.put("a", "file-result", "result.jsonl", "batch_output", [b"line\n"])
    assert not list(tmp_path.rglob("*.part"))
    store.put("a", "file-result", "result.jsonl", "batch_output", [b"line\n"])
    assert store.used("a") == 11
    store.close()


def test_a_file_expires_unless_a_batch_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(str(tmp_path), 100)
    record = add(store, "a", b"x", seconds=3600)
    assert record.expires_at is not None
    monkeypatch.setattr(store_module.time, "time", lambda: record.expires_at + 1.0)  # type: ignore[operator]
    store.held.add(record.id)
    assert store.listed("a")
    with pytest.raises(ApiError) as caught:
        store.delete("a", record.id)
    assert caught.value.status == 409
    store.held.clear()
    assert not store.listed("a")
    assert not store.path("a", record.id).exists()
    assert store.used("a") == 0
    store.close()


def test_one_server_has_the_folder(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path), 100)
    with pytest.raises(UserError, match="--files-dir"):
        FileStore(str(tmp_path), 100)
    store.close()
    FileStore(str(tmp_path), 100).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--files-dir"):
        FileStore(str(tmp_path / "file"), 100)


def test_a_file_is_there_as_a_whole_or_not_at_all_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(100):
        folder = tmp_path / str(number)
        store = FileStore(str(folder), 1000)
        kept = add(store, "a", b"kept")
        disk = KilledDisk(number)
        told: FileRecord | None = None
        with monkeypatch.context() as patched:
            disk.use(patched)
            with contextlib.suppress(KilledError):
                told = add(store, "a", b"content")
                store.delete("a", kept.id)
        store.close()
        store = FileStore(str(folder), 1000)
        found = {each.id: store.path("a", each.id).read_bytes() for each in store.listed("a")}
        assert set(found.values()) <= {b"kept", b"content"}
        assert told is None or found[told.id] == b"content"
        assert store.used("a") == sum(map(len, found.values()))
        names = {path.name.removesuffix(".json") for path in folder.rglob("file-*")}
        assert names == set(found)
        store.close()
        if not disk.dead:
            return
    pytest.fail("more writes than expected")
