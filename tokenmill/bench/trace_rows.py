"""Production traces as plain rows: when, how many prompt and output tokens, which shared blocks.

Reads text and gzip, names file and line in every error. Knows neither prompts nor clients nor engines and imports no
torch: `bench serve` replays these rows against a server, `simulate` against a cost model.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Iterator
from datetime import datetime
from typing import IO, Any

from tokenmill.errors import UserError

BLOCK_TOKENS = 512  # equal ids in `hash_ids` stand for equal blocks of this many tokens
Row = tuple[float, int, int, list[int]]  # seconds, prompt tokens, output tokens, block ids


def open_text(path: str) -> IO[str]:
    try:
        if path.endswith(".gz"):
            return gzip.open(path, "rt", encoding="utf-8")
        return open(path, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", "check the path") from None


def numbered_objects(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a file of JSON lines; empty lines are skipped."""
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if not isinstance(value, dict):
                raise UserError(f"line {number} of {path} is not a JSON object", "give one object a line")
            yield number, value


def azure_rows(path: str) -> Iterator[Row]:
    """CSV of TIMESTAMP, ContextTokens, GeneratedTokens."""
    with open_text(path) as file:
        reader = csv.DictReader(file)
        for line in reader:
            try:
                counts = whole_number(line["ContextTokens"]), whole_number(line["GeneratedTokens"])
                yield azure_seconds(line["TIMESTAMP"]), *counts, []
            except (KeyError, ValueError, TypeError):
                raise UserError(
                    f"line {reader.line_num} of {path} is not of an Azure trace",
                    "it has TIMESTAMP,ContextTokens,GeneratedTokens",
                ) from None


def block_rows(path: str) -> Iterator[Row]:
    """JSON lines of `timestamp` (ms), `input_length`, `output_length` and perhaps `hash_ids`."""
    for number, line in numbered_objects(path):
        try:
            seconds = finite(line["timestamp"]) / 1000
            blocks = [int(each) for each in line.get("hash_ids") or ()]
            yield seconds, whole_number(line["input_length"]), whole_number(line["output_length"]), blocks
        except (KeyError, ValueError, TypeError):
            raise UserError(
                f"line {number} of {path} lacks a field", "it has timestamp, input_length and output_length"
            ) from None


def azure_seconds(text: str) -> float:
    """The trace has seven digits after the point, datetime takes six."""
    seconds, _, fraction = text.partition(".")
    return datetime.fromisoformat(seconds + "+00:00").timestamp() + float(f"0.{fraction or 0}")


def whole_number(value: Any) -> int:
    """A count of tokens; ValueError if negative."""
    count = int(value)
    if count < 0:
        raise ValueError(value)
    return count


def finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number
