"""The workload as requests: synthetic lengths, a file of prompts, or a trace; the same for every contender of a run.

Owns where requests come from; the laboratory owns what is measured with them. Called by the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tokenmill.bench.prompts import SyntheticRequest, random_requests
from tokenmill.bench.serve_datasets import load_items
from tokenmill.bench.serve_job import ServeJob
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.errors import UserError


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """The workload options. Lengths are in tokens; `concurrency` requests are computed at a time."""

    input_len: int = 128
    output_len: int = 64
    concurrency: int = 8
    prompts: Path | None = None
    trace: Path | None = None
    length_scale: float = 1.0  # of a trace, for models of shorter context

    def __post_init__(self) -> None:
        if self.prompts and self.trace:
            raise UserError("both --prompts and --trace are given", "give one of them")
        for name in ("input_len", "output_len", "concurrency"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}", "give at least 1")

    def describe(self) -> dict[str, Any]:
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Traffic:
    """`draw(count, run)`: the requests of a run. Runs of synthetic prompts differ, those of a file repeat."""

    draw: Callable[[int, int], list[SyntheticRequest]]
    longest: int  # tokens of the longest request
    input_tokens: int  # mean, for the planner
    output_tokens: int
    words: str
    is_text: bool = False  # prompts are natural text, not random tokens


_FILE_REQUESTS = 4096  # read at most


def build_traffic(request: TrafficRequest, vocab_size: int, tokenizer: Tokenizer, context: int) -> Traffic:
    r = request
    if r.prompts or r.trace:
        pool = _pool(r, vocab_size, tokenizer)
        longest = max(len(each.prompt_ids) + each.output_len for each in pool)
        traffic = Traffic(
            lambda count, _run: [pool[number % len(pool)] for number in range(count)],
            longest,
            max(1, round(fmean(len(each.prompt_ids) for each in pool))),
            max(1, round(fmean(each.output_len for each in pool))),
            f"{len(pool)} requests of {(r.prompts or r.trace).name}, {r.concurrency} at a time",  # type: ignore[union-attr]
            is_text=r.prompts is not None,
        )
    else:
        traffic = Traffic(
            lambda count, run: random_requests(vocab_size, count, r.input_len, r.output_len, seed=run),
            r.input_len + r.output_len,
            r.input_len,
            r.output_len,
            f"prompts of {r.input_len} and answers of {r.output_len} tokens, {r.concurrency} at a time",
        )
    if traffic.longest > context:
        raise UserError(
            f"the longest request has {traffic.longest} tokens, more than the {context} the model was trained for",
            "lower --input-len or --output-len, or give --length-scale for a trace",
        )
    return traffic


def _pool(request: TrafficRequest, vocab_size: int, tokenizer: Tokenizer) -> list[SyntheticRequest]:
    r = request
    path = str(r.prompts or r.trace)
    name = "custom" if r.prompts else "azure" if ".csv" in path else "mooncake"
    job = ServeJob(
        dataset_name=name,
        dataset_path=path,
        num_prompts=_count_lines(path) if r.prompts else _FILE_REQUESTS,
        custom_output_len=r.output_len,
        trace_length_scale=r.length_scale,
        vocab_size=vocab_size,
    )
    return [
        SyntheticRequest(
            tokenizer.encode(item.prompt) if isinstance(item.prompt, str) else list(item.prompt), item.output_len
        )
        for item in load_items(job)
    ]


def _count_lines(path: str) -> int:
    """`load_items` repeats a short file: ask for as many as it has."""
    try:
        with open(path, "rb") as file:
            return max(1, min(_FILE_REQUESTS, sum(bool(line.strip()) for line in file)))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", "check the path") from None
