"""Production traces as requests: arrival times, lengths, and shared prefixes where the trace has them.

azure: CSV of time, context tokens, generated tokens. mooncake and timed_trace: JSON lines of `timestamp` (ms),
`input_length`, `output_length` and, if present, `hash_ids`: equal ids stand for equal blocks of 512 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import islice
from random import Random

from tokenmill.bench.serve_item import Item
from tokenmill.bench.serve_job import ServeJob
from tokenmill.bench.trace_rows import BLOCK_TOKENS, azure_rows, block_rows
from tokenmill.errors import UserError


def trace_items(job: ServeJob) -> list[Item]:
    rows = azure_rows(job.dataset_path) if job.dataset_name == "azure" else block_rows(job.dataset_path)
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
    size = max(1, round(BLOCK_TOKENS * job.trace_length_scale))

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
