"""Batch records and journals on disk, next to the files of their owner. Blocking; knows nothing of how batches run."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tokenmill.log import get_logger
from tokenmill.serve.batches.journal import Journal, JournalError
from tokenmill.serve.batches.record import BatchRecord
from tokenmill.serve.errors import ApiError
from tokenmill.serve.files.disk import PART, remove, write_whole
from tokenmill.serve.files.store import FileStore

_log = get_logger(__name__)
_MAX_RECORDS = 1000  # of one owner: the oldest that have ended are forgotten
_MAX_UNFINISHED = 20


class BatchStore:
    def __init__(self, files: FileStore) -> None:
        self._files = files
        self._records: dict[str, dict[str, BatchRecord]] = {}  # owner -> id -> record, oldest first
        found: list[BatchRecord] = []
        for folder in files.folders():
            for path in (folder / "batches").glob("*"):
                if path.suffix == PART:
                    remove(path)
                elif path.suffix == ".json":
                    found += self._load(path)
        for record in sorted(found, key=lambda each: each.created_at):
            self._records.setdefault(record.owner, {})[record.id] = record
            if record.ended:
                remove(self._journal_path(record))  # a kill came between the end and this

    def unfinished(self) -> list[BatchRecord]:
        return [each for records in self._records.values() for each in records.values() if not each.ended]

    def listed(self, owner: str) -> list[BatchRecord]:
        """Newest first."""
        return list(reversed(self._records.get(owner, {}).values()))

    def find(self, owner: str, batch_id: str) -> BatchRecord:
        record = self._records.get(owner, {}).get(batch_id)
        if record is None:
            shown = batch_id[:80].encode("ascii", "replace").decode()
            raise ApiError(404, f"there is no batch '{shown}'", param="batch_id", code="batch_not_found")
        return record

    def check_room(self, owner: str) -> None:
        if sum(not each.ended for each in self.listed(owner)) >= _MAX_UNFINISHED:
            raise ApiError(
                429, f"this key has {_MAX_UNFINISHED} unfinished batches", code="batch_limit", retry_after=60
            )

    def save(self, record: BatchRecord) -> BatchRecord:
        """On disk first: what a client was told stays true."""
        write_whole(self._path(record), [msgspec.json.encode(record)])
        records = self._records.setdefault(record.owner, {})
        records[record.id] = record
        if len(records) > _MAX_RECORDS:
            oldest = next((each for each in records.values() if each.ended), None)
            if oldest is not None:
                del records[oldest.id]
                remove(self._path(oldest))
        return record

    def open_journal(self, record: BatchRecord) -> Journal:
        path = self._journal_path(record)
        try:
            return Journal(path)
        except JournalError as error:
            _log.error("%s: %s; from there on it is answered again", path, error)
            _keep_lines(path, error.line - 1)
            return Journal(path)

    def drop_journal(self, record: BatchRecord) -> None:
        remove(self._journal_path(record))

    def _load(self, path: Path) -> list[BatchRecord]:
        try:
            return [msgspec.json.decode(path.read_bytes(), type=BatchRecord)]
        except (OSError, ValueError) as error:
            _log.error("%s is left out: %s", path, error)
            return []

    def _path(self, record: BatchRecord) -> Path:
        return self._files.folder(record.owner) / "batches" / f"{record.id}.json"

    def _journal_path(self, record: BatchRecord) -> Path:
        return self._files.folder(record.owner) / "batches" / f"{record.id}.journal"


def _keep_lines(path: Path, number: int) -> None:
    with open(path, "rb") as file:
        write_whole(path, [next(file) for _ in range(number)])
