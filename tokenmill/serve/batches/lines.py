"""The lines of a batch: requests as OpenAI's files have them, and the line that answers one.

A line is checked for its shape only; what a body means is the route's business, when its turn comes. Ids of answers are
made from their requests, so that an answer can be told from one to another request of the same `custom_id`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
MAX_ROWS = 50_000  # OpenAI's
_MAX_CUSTOM_ID = 512  # characters
ID_PREFIX = "batch_req_"


@dataclass(frozen=True, slots=True)
class Row:
    number: int  # of the line, from 1
    custom_id: str
    url: str
    body: bytes
    model: str | None = None  # that the body asks for

    @property
    def id(self) -> str:
        parts = (self.custom_id.encode(), self.url.encode(), self.body)
        digest = hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts))
        return ID_PREFIX + digest.hexdigest()[:32]


class LineError(Exception):
    """A line that is no request. `line` counts from 1; None: the file as a whole."""

    def __init__(self, line: int | None, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.line = line
        self.code = code
        self.message = message
        self.param = param


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Body(msgspec.Struct):
    stream: Any = None
    model: Any = None


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_body = msgspec.json.Decoder(_Body).decode
_encode = msgspec.json.Encoder().encode


def read_rows(path: Path, endpoints: Collection[str], max_line: int, max_rows: int = MAX_ROWS) -> Iterator[Row]:
    """The requests of a file in order; empty lines are passed over. Raises LineError at the first that is none, and at
    the end if there are none at all."""
    seen: set[str] = set()
    with open(path, "rb") as file:
        number = 0
        while data := file.readline(max_line + 1):
            number += 1
            if len(data) > max_line and not data.endswith(b"\n"):
                raise LineError(number, "line_too_long", f"the line has more than {max_line} bytes")
            if number > 2 * max_rows:
                raise LineError(None, "too_many_requests", f"the file has more than {2 * max_rows} lines")
            if not data.strip():
                continue
            row = _row(number, data, endpoints)
            if row.custom_id in seen:
                raise LineError(number, "duplicate_custom_id", "its custom_id is that of an earlier line", "custom_id")
            seen.add(row.custom_id)
            if len(seen) > max_rows:
                raise LineError(None, "too_many_requests", f"the file has more than {max_rows} requests")
            yield row
    if not seen:
        raise LineError(None, "empty_file", "the file has no requests")


def result_line(row: Row, status: int, request_id: str, body: bytes) -> bytes:
    """The answer to a row, whatever its status."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _encode({"id": row.id, "custom_id": row.custom_id, "response": response, "error": None}) + b"\n"


def unanswered_line(row: Row, code: str, message: str) -> bytes:
    error = {"code": code, "message": message}
    return _encode({"id": row.id, "custom_id": row.custom_id, "response": None, "error": error}) + b"\n"


def _row(number: int, data: bytes, endpoints: Collection[str]) -> Row:
    try:
        line = _decode_line(data)
        body = bytes(line.body)
        read = _decode_body(body) if body.startswith(b"{") else _Body()
    except msgspec.ValidationError as error:
        raise LineError(number, "invalid_line", f"the line is no request: {error}") from None
    except (ValueError, RecursionError):
        raise LineError(number, "invalid_json_line", "the line is not valid JSON") from None
    if not 0 < len(line.custom_id) <= _MAX_CUSTOM_ID:
        problem = f"custom_id must have 1 to {_MAX_CUSTOM_ID} characters"
        raise LineError(number, "invalid_custom_id", problem, "custom_id")
    if line.method != "POST":
        raise LineError(number, "invalid_method", "method must be POST", "method")
    if line.url not in endpoints:
        raise LineError(number, "invalid_url", f"url must be {' or '.join(endpoints)}", "url")
    if not body.startswith(b"{"):
        raise LineError(number, "invalid_body", "body must be an object", "body")
    if read.stream:
        raise LineError(number, "invalid_body", "an answer in a file is not streamed: leave out stream", "body.stream")
    model = read.model if isinstance(read.model, str) else None
    return Row(number, line.custom_id, line.url, body, model)
