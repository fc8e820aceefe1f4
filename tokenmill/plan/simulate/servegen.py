"""ServeGen workloads: many clients, each with rates and burstiness by window of time and histograms of lengths.

The file holds statistics, not requests. Each client's arrivals are drawn by a gamma renewal process with the window's
rate and coefficient of variation (also where the authors fitted a Weibull law: the first two moments are the same), its
lengths from the histogram in force. A client without histograms (not all windows are published) gets those of
another client, drawn by rate. Lazy: a day has a million requests. Read by traces.py.
"""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import accumulate
from random import Random
from typing import Any

from tokenmill.bench.trace_rows import finite, numbered_objects
from tokenmill.errors import UserError
from tokenmill.plan.simulate.workload import Arrival

_WINDOW_S = 600.0  # of the published traces, where a client has one window only
_MODALITIES = ("image", "audio", "video")


@dataclass(frozen=True, slots=True)
class _Histogram:
    values: list[int]
    cumulative: list[float]

    def draw(self, random: Random) -> int:
        at = bisect_right(self.cumulative, random.random() * self.cumulative[-1])
        return self.values[min(at, len(self.values) - 1)]


@dataclass(slots=True)
class _Client:
    windows: list[tuple[float, float, float]] = field(default_factory=list)  # (start s, requests/s, variation)
    starts: list[float] = field(default_factory=list)  # of the length windows
    lengths: list[dict[str, _Histogram]] = field(default_factory=list)


def servegen_arrivals(path: str, seed: int) -> Iterator[Arrival]:
    clients = _read_clients(path)
    _fill_missing_lengths(list(clients.values()), Random(f"{seed}/lengths"))
    streams = [
        _client_arrivals(client, Random(f"{seed}/{name}"))
        for name, client in sorted(clients.items())
        if client.windows and client.lengths
    ]
    begin: float | None = None
    for number, (seconds, prompt, output) in enumerate(merge(*streams)):
        begin = seconds if begin is None else begin
        yield Arrival(number, (seconds - begin) * 1e3, prompt, output)


def _read_clients(path: str) -> dict[str, _Client]:
    clients: dict[str, _Client] = {}
    for number, line in numbered_objects(path):
        try:
            name = str(line["file"]).rsplit("-", 1)[0]
            client = clients.setdefault(name, _Client())
            if line["kind"] == "trace_csv":
                client.windows = [_window(row) for row in line["data"].splitlines() if row.strip()]
            else:
                tables = [(finite(start), _histograms(table)) for start, table in line["data"].items()]
                windows = sorted([pair for pair in tables if pair[1]], key=lambda pair: pair[0])
                client.starts = [start for start, _ in windows]
                client.lengths = [table for _, table in windows]
        except (KeyError, ValueError, TypeError, AttributeError, SyntaxError, IndexError):
            raise UserError(
                f"line {number} of {path} is not of a ServeGen file",
                "it has file, kind (dataset or trace_csv) and data",
            ) from None
    return clients


def _fill_missing_lengths(clients: list[_Client], random: Random) -> None:
    complete = [client for client in clients if client.lengths and client.windows]
    rates = [sum(rate for _, rate, _ in client.windows) for client in complete]
    for client in clients:
        if not client.lengths and any(rates):
            (source,) = random.choices(complete, rates)
            client.starts, client.lengths = source.starts, source.lengths


def _window(row: str) -> tuple[float, float, float]:
    cells = row.split(",")
    start, rate, variation = (finite(cell) for cell in cells[:3])
    if rate < 0 or variation < 0:
        raise ValueError(row)
    return start, rate, variation


def _histograms(table: dict[str, Any]) -> dict[str, _Histogram]:
    """By name; empty for a window in which the client sent nothing."""
    if ast.literal_eval(table["output_tokens"]) == {}:
        return {}
    return {name: _histogram(text) for name, text in table.items() if name.endswith(("_tokens", "_count"))}


def _histogram(text: str) -> _Histogram:
    """The text of a Python dict: tokens -> probability."""
    pairs = sorted((int(value), float(weight)) for value, weight in ast.literal_eval(text).items())
    cumulative = list(accumulate(weight for _, weight in pairs))
    if not pairs or cumulative[-1] <= 0 or pairs[0][0] < 0:
        raise ValueError(text)
    return _Histogram([value for value, _ in pairs], cumulative)


def _client_arrivals(client: _Client, random: Random) -> Iterator[tuple[float, int, int]]:
    starts = [start for start, _, _ in client.windows]
    ends = [*starts[1:], starts[-1] + (starts[1] - starts[0] if len(starts) > 1 else _WINDOW_S)]
    for (start, rate, variation), end in zip(client.windows, ends, strict=True):
        if rate <= 0:
            continue
        shape = 1.0 / max(variation, 1e-3) ** 2
        mean = 1.0 / rate
        seconds = start + random.random() * random.gammavariate(shape, mean / shape)
        while seconds < end:
            yield seconds, *_lengths(client, seconds, random)
            seconds += random.gammavariate(shape, mean / shape)


def _lengths(client: _Client, seconds: float, random: Random) -> tuple[int, int]:
    """(prompt, output) tokens; images, audio and video count as tokens."""
    table = client.lengths[max(0, bisect_right(client.starts, seconds) - 1)]
    prompt = sum(table[name].draw(random) for name in ("input_tokens", "text_tokens") if name in table)
    for kind in _MODALITIES:
        if f"{kind}_count" in table:
            prompt += sum(table[f"{kind}_tokens"].draw(random) for _ in range(table[f"{kind}_count"].draw(random)))
    return max(1, prompt), max(1, table["output_tokens"].draw(random))
