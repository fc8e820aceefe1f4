"""Production traces as requests: arrival times, lengths, and shared prefixes where the trace has them.

azure: CSV of time, context tokens, generated tokens. mooncake and timed_trace: JSON lines of `timestamp` (ms),
`input_length`, `output_length` and, if present, `hash_ids`: equal ids stand for equal blocks of 512 tokens.
traffic_log: the folder of `serve --traffic-log`, whose blocks are smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from random import Random

from tokenmill.bench.serve_item import Item
from tokenmill.bench.serve_job import ServeJob
from tokenmill.bench.trace_rows import BLOCK_TOKENS, Row, azure_rows, block_rows
from tokenmill.bench.traffic_log import LOG_BLOCK_TOKENS, is_traffic_log, log_rows, read_traffic_log
from tokenmill.errors import UserError

PromptMaker = Callable[[int, int, Sequence[int]], list[int]]  # number of the request, its length, its blocks -> ids


def trace_items(job: ServeJob) -> list[Item]:
    rows, block_tokens = _rows(job)
    scale = job.trace_length_scale
    prompt = prompt_maker(job.vocab_size, max(1, round(block_tokens * scale)), job.seed)
    items: list[Item] = []
    began = None
    for seconds, num_prompt, num_output, blocks in islice(rows, job.num_prompts):
        began = seconds if began is None else began
        num_prompt = max(1, round(num_prompt * scale))
        num_output = max(1, round(num_output * scale))
        ids = prompt(len(items), num_prompt, blocks)
        items.append(Item(ids, num_prompt, num_output, (seconds - began) / job.trace_speedup))
    if not items:
        raise UserError(f"{job.dataset_path} has no requests", "give a trace")
    return items


def prompt_maker(vocab_size: int, block_tokens: int, seed: int) -> PromptMaker:
    """Makes prompts of random token ids that are equal exactly where their blocks of `block_tokens` are."""

    def draw(name: str, count: int) -> list[int]:
        random = Random(f"{seed}/{name}")
        return [random.randrange(vocab_size) for _ in range(count)]

    @lru_cache(maxsize=1 << 15)
    def block(number: int) -> list[int]:
        return draw(f"block {number}", block_tokens)

    def prompt(number: int, length: int, blocks: Sequence[int]) -> list[int]:
        ids = [token_id for each in blocks for token_id in block(each)][:length]
        return ids + draw(f"request {number}", length - len(ids))

    return prompt


def _rows(job: ServeJob) -> tuple[Iterator[Row], int]:
    """The rows, and the tokens of one of their blocks."""
    path = job.dataset_path
    if job.dataset_name == "traffic_log" or is_traffic_log(path):
        return log_rows(read_traffic_log(Path(path))), LOG_BLOCK_TOKENS
    return (azure_rows(path) if job.dataset_name == "azure" else block_rows(path)), BLOCK_TOKENS
