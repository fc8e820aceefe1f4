"""Items of a task in, results of a run out: jsonl files, read with line numbers and written atomically.

A result carries a hash of its item, so that two runs are paired by what was asked, whatever their order or limits.
Called by task_run.py.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenmill.errors import UserError
from tokenmill.evaluate.statistics import PairedDifference, compare_paired
from tokenmill.evaluate.tasks.base import Item, ItemResult


def read_jsonl(path: Path, limit: int = 0) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not empty."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror}", "give a .jsonl file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"'{path}' is not UTF-8 at byte {error.start}", "convert it to UTF-8") from None
    items: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"line {number} of '{path}' is not JSON: {error}", "correct that line") from None
        if not isinstance(row, dict):
            raise UserError(f"line {number} of '{path}' is not an object", 'write items like {"question": ...}')
        items.append((number, row))
        if len(items) == limit:
            break
    if not items:
        raise UserError(f"'{path}' has no items", "give a .jsonl file with one object per line")
    return items


def item_hash(item: Item) -> str:
    return hashlib.sha256(json.dumps(item, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def write_results(path: Path, items: Sequence[Item], results: Sequence[ItemResult]) -> None:
    lines = [
        json.dumps({"item": item_hash(item), "metrics": dict(result.metrics), **result.details}, ensure_ascii=False)
        for item, result in zip(items, results, strict=True)
    ]
    draft = path.with_name(path.name + ".new")
    try:
        draft.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror}", "give another --out") from None
    finally:
        draft.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Raise now, before long work, if the file cannot be written."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"cannot write '{path}'", "give a file in a folder that exists and can be written as --out")


def read_metrics(path: Path) -> dict[str, Mapping[str, float]]:
    """Metrics by item hash, of a file that `write_results` made."""
    metrics: dict[str, Mapping[str, float]] = {}
    for number, row in read_jsonl(path):
        if not isinstance(row.get("item"), str) or not isinstance(row.get("metrics"), dict):
            raise UserError(f"line {number} of '{path}' is no result", "give a file that `eval task --out` wrote")
        metrics[row["item"]] = row["metrics"]
    return metrics


def compare_with(
    path: Path,
    baseline: Mapping[str, Mapping[str, float]],
    items: Sequence[Item],
    results: Sequence[ItemResult],
    metric: str,
) -> PairedDifference:
    """Our metric minus the baseline's, on the items that both have."""
    pairs = [
        (baseline[key][metric], result.metrics[metric])
        for item, result in zip(items, results, strict=True)
        if metric in baseline.get(key := item_hash(item), {})
    ]
    if not pairs:
        raise UserError(f"'{path}' has results of none of these items", "compare runs on the same file")
    return compare_paired([theirs for theirs, _ in pairs], [ours for _, ours in pairs])
