"""Prompts and output lengths of a benchmark: synthetic, from a file or from a trace. Deterministic for a seed.

Prompts are token ids, or words that stand for them one to one, so that shared prefixes stay shared as text. Knows
nothing of servers or of time, except that a trace's requests carry their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from random import Random
from typing import Any

from tokenmill.bench.prompts import random_requests
from tokenmill.bench.serve_item import Item
from tokenmill.bench.serve_job import ServeJob
from tokenmill.bench.serve_traces import trace_items
from tokenmill.bench.trace_rows import numbered_objects
from tokenmill.errors import UserError

# Common words that most vocabularies hold as one token with their space: about as many tokens as words.
_WORD_LIST = """
the of and to in is that it was for on are as with his they at be this from have or by one had not but what
all were when we there can an your which their said if do will each about how up out them then she many some
so these would other into has more her two like him see time could no make than first been its who now people
my made over did down only way find use may water long little very after words called just where most know get
through back much before go good new write our used me man too any day same right look think also around
another came come work three word must because does part even place well such here take why things help put
years different away again off went old number great tell men say small every found still between name should
home big give air line set own under read last never us left end along while might next sound below saw
something thought both few those always looked show large often together asked house world going want school
important until form food keep
"""
_WORDS = _WORD_LIST.split()


def load_items(job: ServeJob) -> list[Item]:
    match job.dataset_name:
        case "random":
            items = _random_items(job)
        case "prefix_repetition":
            items = _prefix_items(job)
        case "custom":
            return _custom_items(job)
        case _:
            items = trace_items(job)
    return [_with_text(item) for item in items] if job.wants_text else items


def as_text(ids: list[int]) -> str:
    return " ".join([_WORDS[token_id % len(_WORDS)] for token_id in ids])


def json_lines(path: str) -> Iterator[dict[str, Any]]:
    return (value for _, value in numbered_objects(path))


def _random_items(job: ServeJob) -> list[Item]:
    requests = random_requests(
        job.vocab_size,
        job.num_prompts,
        job.random_input_len,
        job.random_output_len,
        job.random_range_ratio,
        job.random_prefix_len,
        job.seed,
    )
    return [Item(each.prompt_ids, len(each.prompt_ids), each.output_len) for each in requests]


def _prefix_items(job: ServeJob) -> list[Item]:
    """Requests of all prefixes in random order."""
    random = Random(job.seed)

    def draw(count: int) -> list[int]:
        return [random.randrange(job.vocab_size) for _ in range(count)]

    prefixes = [draw(job.prefix_repetition_prefix_len) for _ in range(job.prefix_repetition_num_prefixes)]
    items = []
    for prefix in islice(cycle(prefixes), job.num_prompts):
        prompt = prefix + draw(job.prefix_repetition_suffix_len)
        items.append(Item(prompt, len(prompt), job.prefix_repetition_output_len))
    random.shuffle(items)
    return items


def _custom_items(job: ServeJob) -> list[Item]:
    """Lines with `prompt` (text or token ids) and perhaps `output_tokens`; a short file is used again."""
    items = []
    for line in islice(json_lines(job.dataset_path), job.num_prompts):
        prompt, output_len = line.get("prompt"), line.get("output_tokens", job.custom_output_len)
        is_ids = isinstance(prompt, list) and all(type(each) is int for each in prompt)
        if not prompt or not (is_ids or isinstance(prompt, str)) or type(output_len) is not int or output_len < 1:
            raise UserError(f"a line of {job.dataset_path} has no usable prompt", 'write {"prompt": "..."}')
        if is_ids and job.wants_text:
            raise UserError(
                f"{job.dataset_path} has token ids, but the prompt format is text", "use --prompt-format ids"
            )
        items.append(Item(prompt, len(prompt) if is_ids else 0, output_len))
    if not items:
        raise UserError(f"{job.dataset_path} is empty", "give one JSON object a line")
    return list(islice(cycle(items), job.num_prompts))


def _with_text(item: Item) -> Item:
    assert isinstance(item.prompt, list)
    return Item(as_text(item.prompt), item.prompt_len, item.output_len, item.timestamp)
