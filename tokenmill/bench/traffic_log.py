"""Reads what `serve --traffic-log DIR` wrote: arrivals, lengths, prefix hashes, cache hits and latencies of requests.

Lines that were cut or damaged are skipped and counted in one warning. Knows the file format (docs/traffic_log.md), not
how it is written (serve/traffic_log.py) nor what is done with it. Imports no torch and nothing beyond the base install.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from tokenmill.bench.trace_rows import Row
from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.serve.traffic_log_format import BLOCK_TOKENS as LOG_BLOCK_TOKENS
from tokenmill.serve.traffic_log_format import HASH_BYTES, HEADER, PATTERN, VERSION

__all__ = ["LOG_BLOCK_TOKENS", "LoggedRequest", "is_traffic_log", "log_rows", "read_traffic_log"]

_log = get_logger(__name__)
_MAX_TOKENS = 1 << 31
_MAX_UNIX = 1e11  # seconds: beyond any clock


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One prompt that a server was asked to answer. Times that were not measured are None."""

    arrival_s: float  # since the first request of the log
    prompt_tokens: int
    output_tokens: int  # of all `n` answers
    prefix_hashes: tuple[int, ...] = ()  # one per full block of LOG_BLOCK_TOKENS, of all tokens up to its end
    cached_tokens: int = 0
    ttft_ms: float | None = None
    itl_ms: float | None = None  # mean
    itl_max_ms: float | None = None
    e2e_ms: float | None = None
    finish_reason: str = ""
    error: str = ""  # kind of the error that ended or refused it, such as "queue_full"; empty if it was answered
    model: str = ""
    tenant: str = ""  # keyed hash of the API key's name
    n: int = 1
    max_tokens: int = 0
    arrival_unix: float = 0.0


def is_traffic_log(path: str | Path) -> bool:
    """Whether this is a folder with traffic log files."""
    folder = Path(path)
    return folder.is_dir() and any(folder.glob(PATTERN))


def read_traffic_log(folder: Path) -> list[LoggedRequest]:
    """All requests in the order of arrival. Raises UserError if there are none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder", "give the folder of `tokenmill serve --traffic-log`")
    found: list[LoggedRequest] = []
    num_damaged = 0
    for path in sorted(folder.glob(PATTERN)):
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # the server rotated it away
            continue
        except OSError as error:
            raise UserError(
                f"cannot read {path}: {error.strerror}", "read it as the user that runs the server"
            ) from None
        requests, damaged = _read(data, path)
        found += requests
        num_damaged += damaged
    if num_damaged:
        _log.warning("%d damaged lines of the traffic log in %s are skipped", num_damaged, folder)
    if not found:
        raise UserError(f"{folder} holds no logged requests", "serve some with `tokenmill serve --traffic-log`")
    found.sort(key=lambda each: each.arrival_unix)
    began = found[0].arrival_unix
    return [replace(each, arrival_s=each.arrival_unix - began) for each in found]


def log_rows(requests: Sequence[LoggedRequest], block_tokens: int = LOG_BLOCK_TOKENS) -> Iterator[Row]:
    """As rows of a trace. `block_tokens`: tokens of a block of the rows, a multiple of the log's.

    A request that got no token (refused, or ended before) is offered load too: it counts with the median answer.
    """
    assert block_tokens % LOG_BLOCK_TOKENS == 0
    step = block_tokens // LOG_BLOCK_TOKENS
    answers = [max(1, each.output_tokens // each.n) for each in requests if each.output_tokens]
    typical = round(median(answers)) if answers else 1
    for each in requests:
        output = (
            max(1, each.output_tokens // each.n) if each.output_tokens else min(typical, each.max_tokens or typical)
        )
        yield each.arrival_s, each.prompt_tokens, output, list(each.prefix_hashes[step - 1 :: step])


def _read(data: bytes, path: Path) -> tuple[list[LoggedRequest], int]:
    """(requests, number of damaged lines) of one file. What follows the last line feed is being written, or was cut."""
    requests, damaged = [], 0
    for line in data.split(b"\n")[:-1]:
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if HEADER in value:
                _check_version(value[HEADER], path)
            else:
                requests.append(_request(value))
        except (ValueError, TypeError, KeyError, RecursionError, binascii.Error):
            damaged += 1
    return requests, damaged


def _check_version(version: Any, path: Path) -> None:
    if type(version) is int and version > VERSION:
        raise UserError(
            f"{path} has version {version} of the traffic log", f"upgrade: this release reads up to {VERSION}"
        )


def _request(value: Any) -> LoggedRequest:
    """Raises ValueError, TypeError or KeyError for what the server cannot have written."""
    if not isinstance(value, dict):
        raise TypeError(value)
    packed = base64.b64decode(value.get("prefix", ""), validate=True)
    prompt_tokens = _count(value["prompt_tokens"], 1)
    if len(packed) % HASH_BYTES or len(packed) // HASH_BYTES > prompt_tokens // LOG_BLOCK_TOKENS:
        raise ValueError("prefix")
    arrival = _number(value["arrival_unix"], _MAX_UNIX)
    return LoggedRequest(
        arrival_s=arrival,
        prompt_tokens=prompt_tokens,
        output_tokens=_count(value["output_tokens"], 0),
        prefix_hashes=tuple(_hashes(packed)),
        cached_tokens=_count(value.get("cached_tokens", 0), 0),
        ttft_ms=_milliseconds(value.get("ttft_ms")),
        itl_ms=_milliseconds(value.get("itl_ms")),
        itl_max_ms=_milliseconds(value.get("itl_max_ms")),
        e2e_ms=_milliseconds(value.get("e2e_ms")),
        finish_reason=_text(value.get("finish_reason", "")),
        error=_text(value.get("error", "")),
        model=_text(value.get("model", "")),
        tenant=_text(value.get("tenant", "")),
        n=_count(value.get("n", 1), 1),
        max_tokens=_count(value.get("max_tokens", 0), 0),
        arrival_unix=arrival,
    )


def _hashes(packed: bytes) -> Iterable[int]:
    return (int.from_bytes(packed[at : at + HASH_BYTES], "big") for at in range(0, len(packed), HASH_BYTES))


def _count(value: Any, low: int) -> int:
    if type(value) is not int or not low <= value < _MAX_TOKENS:
        raise ValueError(value)
    return value


def _number(value: Any, high: float) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value <= high:
        raise ValueError(value)
    return float(value)


def _milliseconds(value: Any) -> float | None:
    return None if value is None else _number(value, 1e12)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value
