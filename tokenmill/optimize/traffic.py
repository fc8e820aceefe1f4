"""The workload as requests: synthetic lengths, a file of prompts, a trace or a server's traffic log; the same for every
contender of a run.

`build_traffic` makes requests for the engine itself, `build_arrivals` the same requests with their times, for replays
through the serving path. Owns where requests come from; the laboratory and replay.py own what is measured with them.
Called by the job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

from tokenmill.bench.prompts import SyntheticRequest, random_requests
from tokenmill.bench.serve_datasets import load_items
from tokenmill.bench.serve_item import Item
from tokenmill.bench.serve_job import ServeJob
from tokenmill.bench.serve_traces import prompt_maker
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.errors import UserError
from tokenmill.optimize.arrivals import Arrivals, ReplayLimits, recorded_rows, scaled_rows


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """The workload options. Lengths are in tokens; at most `concurrency` requests are computed at a time, in a server
    as many as it has by default where nobody states it."""

    input_len: int = 128
    output_len: int = 64
    concurrency: int | None = None
    prompts: Path | None = None
    trace: Path | None = None
    length_scale: float = 1.0  # of a trace, for models of shorter context
    traffic_log: Path | None = None  # folder of `serve --traffic-log`
    rate: float = 0.0  # requests per second of what has no times of its own; 0: stated by nobody
    replay_seconds: float = 30.0  # of the busiest part that is replayed
    rate_scale: float = 1.0  # of the arrivals, for machines smaller than the trace's

    def __post_init__(self) -> None:
        sources = {"--prompts": self.prompts, "--trace": self.trace, "--traffic-log": self.traffic_log}
        given = [flag for flag, path in sources.items() if path]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} are given", "give one of them")
        if not 0 <= self.rate < float("inf"):
            raise UserError(f"--rate is {self.rate:g}", "give requests per second")
        for name in ("input_len", "output_len", "concurrency"):
            if (value := getattr(self, name)) is not None and value < 1:
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


_SHORTEST_REPLAY, _LONGEST_REPLAY = 5.0, 30.0
_CONCURRENCY = {"cpu": 8, "cuda": 64}  # enough to fill the device, few enough for a run of seconds
_FILE_REQUESTS = 4096  # read at most
_DRAWN_REQUESTS = 32  # where no rate is stated; a longer replay repeats them with other tokens


def replay_length(seconds: float) -> float:
    """Seconds of one replay in a run of `seconds`: about ten are needed, and starting servers takes as long again."""
    return min(_LONGEST_REPLAY, max(_SHORTEST_REPLAY, seconds / 24))


def concurrency_of(request: TrafficRequest, device: str) -> int:
    """Requests at a time while throughput is measured."""
    return request.concurrency or _CONCURRENCY[device]


def build_traffic(
    request: TrafficRequest, vocab_size: int, tokenizer: Tokenizer, context: int, device: str = "cpu"
) -> Traffic:
    r, concurrency = request, concurrency_of(request, device)
    file = r.prompts or r.trace or r.traffic_log
    if file:
        pool = _pool(r, vocab_size, tokenizer)
        longest = max(len(each.prompt_ids) + each.output_len for each in pool)
        traffic = Traffic(
            lambda count, _run: [pool[number % len(pool)] for number in range(count)],
            longest,
            max(1, round(fmean(len(each.prompt_ids) for each in pool))),
            max(1, round(fmean(each.output_len for each in pool))),
            f"{len(pool)} requests of {file.name}, {concurrency} at a time",
            is_text=r.prompts is not None,
        )
    else:
        traffic = Traffic(
            lambda count, run: random_requests(vocab_size, count, r.input_len, r.output_len, seed=run),
            r.input_len + r.output_len,
            r.input_len,
            r.output_len,
            f"prompts of {r.input_len} and answers of {r.output_len} tokens, {concurrency} at a time",
        )
    if traffic.longest > context:
        raise UserError(
            f"the longest request has {traffic.longest} tokens, more than the {context} the model was trained for",
            "lower --input-len or --output-len, or give --length-scale for a trace",
        )
    return traffic


def build_arrivals(request: TrafficRequest, vocab_size: int, context: int) -> Arrivals:
    """The requests of `build_traffic` with their times."""
    r = request
    limits = ReplayLimits(r.replay_seconds, r.rate_scale, r.length_scale, context)
    recorded = r.traffic_log or r.trace
    if recorded:
        return Arrivals.from_trace(recorded, vocab_size, limits, rate=r.rate)
    if r.prompts:
        pool = [(item.prompt, item.output_len) for item in _prompt_items(r.prompts, r.output_len)]
        return Arrivals.from_prompts(pool, r.rate, r.prompts.name, limits, vocab_size)
    asked = ceil(r.rate * r.rate_scale * r.replay_seconds)
    count = min(_FILE_REQUESTS, asked) if r.rate else _DRAWN_REQUESTS
    drawn = random_requests(vocab_size, count, r.input_len, r.output_len)
    name = f"{r.input_len} tokens in and {r.output_len} out"
    requests: list[tuple[list[int] | str, int]] = [(each.prompt_ids, each.output_len) for each in drawn]
    return Arrivals.from_prompts(requests, r.rate, name, limits, vocab_size)


def _pool(request: TrafficRequest, vocab_size: int, tokenizer: Tokenizer) -> list[SyntheticRequest]:
    r = request
    if r.prompts:
        return [
            SyntheticRequest(
                tokenizer.encode(item.prompt) if isinstance(item.prompt, str) else list(item.prompt), item.output_len
            )
            for item in _prompt_items(r.prompts, r.output_len)
        ]
    recorded = r.traffic_log or r.trace
    assert recorded is not None
    rows, block_tokens, _ = recorded_rows(recorded)
    rows = scaled_rows(rows[:_FILE_REQUESTS], r.length_scale)
    prompt = prompt_maker(vocab_size, max(1, round(block_tokens * r.length_scale)), 0)
    return [SyntheticRequest(prompt(number, row[1], row[3]), row[2]) for number, row in enumerate(rows)]


def _prompt_items(path: Path, output_len: int) -> list[Item]:
    count = _count_lines(str(path))
    job = ServeJob(dataset_name="custom", dataset_path=str(path), num_prompts=count, custom_output_len=output_len)
    return load_items(job)


def _count_lines(path: str) -> int:
    """`load_items` repeats a short file: ask for as many as it has."""
    try:
        with open(path, "rb") as file:
            return max(1, min(_FILE_REQUESTS, sum(bool(line.strip()) for line in file)))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", "check the path") from None
