"""The results of a run so far, on disk: a killed or repeated command continues where it stopped.

One JSON file in the output directory, replaced as a whole after every measurement, tied to the question by a hash. The
candidate being tried is marked, so that a killed process is seen by the next one. Knows nothing of what it holds.
Called by the laboratory and the loop.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenmill.checkpoint.sources.cache import write_json
from tokenmill.errors import UserError

_FILE = "measurements.json"


def question_key(question: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(question, sort_keys=True, default=str).encode()).hexdigest()


class Store:
    def __init__(self, folder: Path, key: str, restart: bool = False) -> None:
        self._file = folder / _FILE
        self._content: dict[str, Any] = {"key": key, "attempt": None, "found": {}}
        folder.mkdir(parents=True, exist_ok=True)
        if self._file.is_file() and not restart:
            self._content = self._read(key)

    @property
    def folder(self) -> Path:
        return self._file.parent

    def _read(self, key: str) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads(self._file.read_text(encoding="utf-8"))
            same = content["key"] == key and isinstance(content["found"], dict)
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(f"{self._file} is damaged", "give --restart, or another --out") from None
        if not same:
            raise UserError(
                f"{self._file.parent} holds the measurements of another model, workload, text or version",
                "give another --out, or --restart to discard them",
            )
        return content

    def recall(self, kind: str, name: str) -> Any:
        """The stored value, or None."""
        return self._content["found"].get(f"{kind}:{name}")

    def remember(self, kind: str, name: str, value: Any) -> None:
        self._content["found"][f"{kind}:{name}"] = value
        write_json(self._file, self._content)

    @property
    def interrupted_attempt(self) -> str | None:
        """The candidate that an earlier process was trying when it was killed."""
        attempt: str | None = self._content["attempt"]
        return attempt

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Mark a candidate as being tried; an exception, Ctrl-C included, clears the mark."""
        self._mark(name)
        try:
            yield
        finally:
            self._mark(None)

    def forget_attempt(self) -> None:
        self._mark(None)

    def _mark(self, name: str | None) -> None:
        self._content["attempt"] = name
        write_json(self._file, self._content)
