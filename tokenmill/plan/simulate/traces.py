"""Trace files as arrivals, detected by content: Azure CSV, vidur CSV, Mooncake or other JSON lines, ServeGen.

Every malformed line is refused with its number. A trace without times (vidur, plain lengths) needs a rate or users.
Knows nothing of engines; called by the job.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.bench.trace_rows import azure_rows, block_rows, finite, numbered_objects, open_text, whole_number
from tokenmill.errors import UserError
from tokenmill.plan.simulate.servegen import servegen_arrivals
from tokenmill.plan.simulate.workload import Arrival

# Accepted names of the three fields of a JSON line, in order of preference; times in seconds.
_TIMES = ("arrival_s", "arrived_at", "arrival_time", "arrival")
_INPUTS = ("input_length", "input_tokens", "prompt_tokens", "prompt_len", "num_prefill_tokens")
_OUTPUTS = ("output_length", "output_tokens", "completion_tokens", "output_len", "num_decode_tokens")


@dataclass(frozen=True, slots=True)
class Trace:
    kind: str  # "azure" | "vidur" | "mooncake" | "servegen" | "jsonl"
    timed: bool
    arrivals: Callable[[], Iterator[Arrival]]


def open_trace(path: str, seed: int = 0) -> Trace:
    """Choose the reader by the first line."""
    first = _first_line(path)
    if first.lstrip().startswith("{"):
        return _json_trace(path, first, seed)
    columns = [name.strip() for name in first.strip().split(",")]
    if "ContextTokens" in columns:
        return Trace("azure", True, lambda: _checked(path, _since_first(_azure(path))))
    if "num_prefill_tokens" in columns and "num_decode_tokens" in columns:
        timed = "arrived_at" in columns
        return Trace("vidur", timed, lambda: _checked(path, _since_first(_vidur(path))))
    raise UserError(
        f"line 1 of {path} is not of a known trace format",
        "give an Azure or vidur CSV, Mooncake or ServeGen JSON lines, or lines with input_length and output_length",
    )


def _first_line(path: str) -> str:
    try:
        with open_text(path) as file:
            for line in file:
                if line.strip():
                    return line
    except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is not a text file: {error}", "give a CSV or JSON lines, perhaps gzipped") from None
    raise UserError(f"{path} is empty", "give a trace")


def _json_trace(path: str, first: str, seed: int) -> Trace:
    try:
        value = json.loads(first)
    except ValueError:
        raise UserError(f"line 1 of {path} is not a JSON object", "give one object a line") from None
    if value.get("kind") in ("dataset", "trace_csv"):
        return Trace("servegen", True, lambda: _checked(path, servegen_arrivals(path, seed)))
    if "timestamp" in value:
        return Trace("mooncake", True, lambda: _checked(path, _since_first(_mooncake(path))))
    timed = any(name in value for name in _TIMES)
    return Trace("jsonl", timed, lambda: _checked(path, _since_first(_plain(path, timed))))


def _checked(path: str, arrivals: Iterator[Arrival]) -> Iterator[Arrival]:
    """Damage anywhere in the file is a user error, not ours."""
    try:
        yield from arrivals
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} is damaged: {error}", "fetch it again") from None


def _since_first(rows: Iterator[Arrival]) -> Iterator[Arrival]:
    """Times relative to the first arrival, never decreasing: a server sees requests in the order they arrive."""
    begin: float | None = None
    latest = 0.0
    for arrival in rows:
        begin = arrival.ms if begin is None else begin
        latest = max(latest, arrival.ms - begin)
        yield replace(arrival, ms=latest)


def _azure(path: str) -> Iterator[Arrival]:
    for number, (seconds, prompt, output, _) in enumerate(azure_rows(path)):
        yield Arrival(number, seconds * 1e3, max(1, prompt), max(1, output))


def _mooncake(path: str) -> Iterator[Arrival]:
    for number, (seconds, prompt, output, blocks) in enumerate(block_rows(path)):
        yield Arrival(number, seconds * 1e3, max(1, prompt), max(1, output), tuple(blocks))


def _vidur(path: str) -> Iterator[Arrival]:
    with open_text(path) as file:
        reader = csv.DictReader(file)
        for number, line in enumerate(reader):
            try:
                prompt, output = whole_number(line["num_prefill_tokens"]), whole_number(line["num_decode_tokens"])
                ms = finite(line.get("arrived_at") or 0.0) * 1e3
            except (KeyError, ValueError, TypeError):
                raise UserError(
                    f"line {reader.line_num} of {path} is not of a vidur trace",
                    "it has num_prefill_tokens,num_decode_tokens",
                ) from None
            yield Arrival(number, ms, max(1, prompt), max(1, output))


def _plain(path: str, timed: bool) -> Iterator[Arrival]:
    for number, (line, value) in enumerate(numbered_objects(path)):
        try:
            prompt, output = whole_number(_field(value, _INPUTS)), whole_number(_field(value, _OUTPUTS))
            ms = finite(_field(value, _TIMES)) * 1e3 if timed else 0.0
            blocks = tuple(int(each) for each in value.get("hash_ids") or ())
        except (KeyError, ValueError, TypeError):
            raise UserError(
                f"line {line} of {path} lacks a field or has one of the wrong kind",
                f"it has input_length, output_length{' and ' + _TIMES[0] if timed else ''}",
            ) from None
        yield Arrival(number, ms, max(1, prompt), max(1, output), blocks)


def _field(value: dict[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if name in value:
            return value[name]
    raise KeyError(names[0])
