"""Prints a result: one JSON object, tables on a terminal, or `key: value` lines elsewhere.

The only place that writes results to stdout. Knows nothing of what it prints: a result is a mapping of plain values,
where a mapping is a section and a list of mappings a table. Colours follow NO_COLOR (rich does).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Result = Mapping[str, Any]


def emit(result: Result, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_finite(result), allow_nan=False), flush=True)
    elif sys.stdout.isatty():
        _print_tables(result)
    else:
        for key, value in flatten(result):
            print(f"{key}: {value}")
        sys.stdout.flush()


def flatten(result: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested values as ("section.key", text) lines."""
    if isinstance(result, Mapping):
        for key, value in result.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif _is_table(result):
        for number, row in enumerate(result):
            name = str(next(iter(row.values()), number))
            rest = dict(list(row.items())[1:])
            yield f"{prefix}.{name}", ", ".join(f"{key} {value}" for key, value in flatten(rest))
    elif _is_prose(result):
        for number, text in enumerate(result, 1):
            yield f"{prefix}.{number}", text
    else:
        yield prefix, readable(result, prefix)


def readable(value: Any, key: str = "") -> str:
    if "bytes" in key.rpartition(".")[2].split("_") and isinstance(value, int) and value >= 10**6:
        return f"{value} ({value / 10**9:.2f} GB)" if value >= 10**9 else f"{value} ({value / 10**6:.1f} MB)"
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, (list, tuple)):
        return ", ".join(readable(each) for each in value) or "none"
    return str(value)


def _is_table(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _is_prose(value: Any) -> bool:
    """Sentences, which deserve a line each."""
    return isinstance(value, (list, tuple)) and any(isinstance(each, str) and len(each) > 60 for each in value)


def _finite(value: Any) -> Any:
    """JSON has no infinity: such numbers become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def _print_tables(result: Result) -> None:
    from rich.console import Console

    console = Console()
    plain = {key: value for key, value in result.items() if not isinstance(value, Mapping) and not _is_table(value)}
    console.print(_pairs_table(flatten(plain)))
    for key, value in result.items():
        if _is_table(value):
            console.print(_rows_table(key, value))
        elif isinstance(value, Mapping) and value:
            console.print(_pairs_table(flatten(value), _title(key)))


def _pairs_table(pairs: Iterable[tuple[str, str]], title: str | None = None) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, title=title, title_justify="left", title_style="bold", padding=(0, 2))
    for key, value in pairs:
        table.add_row(Text(key.replace("_", " "), style="cyan"), Text(value))
    return table


def _rows_table(title: str, rows: list[Mapping[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=_title(title), title_justify="left", title_style="bold", box=None, padding=(0, 2))
    for column in rows[0]:
        table.add_column(column.replace("_", " "), style="cyan" if column == next(iter(rows[0])) else "")
    for row in rows:
        table.add_row(*(Text(readable(value, key)) for key, value in row.items()))
    return table


def _title(key: str) -> str:
    return f"\n{key.replace('_', ' ')}"
