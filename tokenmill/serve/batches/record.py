"""A batch as it is kept and shown: OpenAI's object, and the only ways from one status to the next.

    validating -> in_progress -> finalizing -> completed | expired | failed
    validating -> failed;  validating, in_progress -> cancelling -> cancelled

Pure values; runner.py moves them, store.py keeps them.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

ENDED = ("completed", "failed", "expired", "cancelled")
_NEXT = {
    "validating": ("in_progress", "failed", "cancelling"),
    "in_progress": ("finalizing", "cancelling"),
    "finalizing": ("completed", "expired", "failed"),
    "cancelling": ("cancelled",),
}
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class BatchRecord(msgspec.Struct, frozen=True):
    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: str = "validating"
    ending: str = ""  # what finalizing leads to
    times: dict[str, int] = {}  # status -> when it was entered
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[dict[str, Any]] = []
    output_file_id: str | None = None
    error_file_id: str | None = None
    metadata: dict[str, str] | None = None

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def may_enter(self, status: str) -> bool:
        return status in _NEXT.get(self.status, ())

    def enter(self, status: str, now: float, **changes: Any) -> BatchRecord:
        """The record in its next status."""
        assert self.may_enter(status), f"{self.status} does not lead to {status}"
        times = self.times | {status: int(now)}
        return msgspec.structs.replace(self, status=status, times=times, **changes)

    def result_id(self, kind: str) -> str:
        """The id of its output or error file: the same however often the end is repeated."""
        return "file-" + hashlib.sha256(f"{self.id}:{kind}".encode()).hexdigest()[:32]

    def shown(self) -> dict[str, Any]:
        values = {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }
        return values | {f"{status}_at": self.times.get(status) for status in _TIMES}
