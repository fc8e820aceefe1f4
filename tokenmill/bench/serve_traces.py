"""Production traces as requests: arrival times, lengths, and shared prefixes where the trace tells them.

azure: CSV of time, context tokens, generated tokens. mooncake and timed_trace: JSON lines of `timestamp` (ms),
`input_length`, `output_length` and, if present, `hash_ids`: equal ids stand for equal blocks of 512 tokens.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache
from itertools import islice
from random import Random

from tokenmill.bench.serve_datasets import Item, json_lines, open_text
from tokenmill.bench.serve_job import ServeJob
from tokenmill.errors import UserError

_BLOCK_TOKENS = 512
Row = tuple[float, int, int, list[int]]  # seconds, prompt tokens, output tokens, block ids


def trace_items(job: ServeJob) -> list[Item]:
    rows = _azure_rows(job.dataset_path) if job.dataset_name == "azure" else _block_rows(job.dataset_path)
    prompt = _prompt_maker(job)
    items: list[Item] = []
    began = None
    for seconds, num_prompt, num_output, blocks in islice(rows, job.num_prompts):
        began = seconds if began is None else began
        num_prompt = max(1, round(num_prompt * job.trace_length_scale))
        num_output = max(1, round(num_output * job.trace_length_scale))
        ids = prompt(len(items), num_prompt, blocks)
        items.append(Item(ids, num_prompt, num_output, (seconds - began) / job.trace_speedup))
    if not items:
        raise UserError(f"{job.dataset_path} has no requests", "give a trace")
    return items


def _prompt_maker(job: ServeJob) -> Callable[[int, int, list[int]], list[int]]:
    size = max(1, round(_BLOCK_TOKENS * job.trace_length_scale))

    def draw(name: str, count: int) -> list[int]:
        random = Random(f"{job.seed}/{name}")
        return [random.randrange(job.vocab_size) for _ in range(count)]

    @lru_cache(maxsize=4096)
    def block(number: int) -> list[int]:
        return draw(f"block {number}", size)

    def prompt(number: int, length: int, blocks: list[int]) -> list[int]:
        ids = [token_id for each in blocks for token_id in block(each)][:length]
        return ids + draw(f"request {number}", length - len(ids))

    return prompt


def _azure_rows(path: str) -> Iterator[Row]:
    with open_text(path) as file:
        reader = csv.DictReader(file)
        for line in reader:
            try:
                yield (
                    _seconds(line["TIMESTAMP"]),
                    int(line["ContextTokens"]),
                    int(line["GeneratedTokens"]),
                    [],
                )
            except (KeyError, ValueError, TypeError):
                raise UserError(
                    f"line {reader.line_num} of {path} is not of an Azure trace",
                    "it has TIMESTAMP,ContextTokens,GeneratedTokens",
                ) from None


def _seconds(text: str) -> float:
    """The trace has seven digits after the point, datetime takes six."""
    whole, _, fraction = text.partition(".")
    return datetime.fromisoformat(whole + "+00:00").timestamp() + float(f"0.{fraction or 0}")


def _block_rows(path: str) -> Iterator[Row]:
    for number, line in enumerate(json_lines(path), 1):
        try:
            seconds = float(line["timestamp"]) / 1000
            blocks = [int(each) for each in line.get("hash_ids") or ()]
            yield seconds, int(line["input_length"]), int(line["output_length"]), blocks
        except (KeyError, ValueError, TypeError):
            raise UserError(
                f"request {number} of {path} lacks a field", "it has timestamp, input_length and output_length"
            ) from None
