"""Arrivals: when which prompts are sent and how long their answers are, for replays through the serving path.

Made from a trace, a traffic log, a file of prompts, or drawn; a long trace is cut to its busiest window, and the rate
may be scaled, which the words say. Prompts of traces are random token ids that share exactly the blocks that the trace
says are shared. Deterministic. Knows nothing of servers; replay.py sends these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from tokenmill.bench.serve_arrivals import gamma_offsets
from tokenmill.bench.serve_traces import prompt_maker
from tokenmill.bench.trace_rows import BLOCK_TOKENS, Row
from tokenmill.bench.traffic_log import LOG_BLOCK_TOKENS, log_rows, read_traffic_log
from tokenmill.errors import UserError
from tokenmill.plan.simulate.traces import open_trace

_MAX_LEFT_OUT = 0.05  # share of the requests that may be longer than the context
_MAX_REQUESTS = 4096
_NOMINAL_RATE = 1.0  # requests per second, which searches scale where nobody states a rate
_FREE_RATE = "at the highest rate that keeps the objectives"


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """What part of the traffic is replayed, and how fast. Times are those of the replay."""

    seconds: float = 30.0
    rate_scale: float = 1.0  # over the rate of the traffic
    length_scale: float = 1.0
    context: int = 0  # tokens that a request may have; 0: no limit

    def __post_init__(self) -> None:
        for name, flag in (
            ("seconds", "replay-seconds"),
            ("rate_scale", "rate-scale"),
            ("length_scale", "length-scale"),
        ):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"--{flag} is {getattr(self, name):g}", "give more than 0")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """`times_s` since the start of the replay, ascending. A prompt is token ids, or text where the user gave text.
    Where nobody states a rate, that of the times means nothing: a server is measured at the rate that it sustains."""

    times_s: tuple[float, ...]
    prompts: tuple[list[int] | str, ...]
    output_lens: tuple[int, ...]
    words: str
    vocab_size: int = 0  # ids of the prompts are below; 0: unknown
    has_rate: bool = True  # of its own, or stated by the user

    def __post_init__(self) -> None:
        assert len(self.times_s) == len(self.prompts) == len(self.output_lens)

    def __len__(self) -> int:
        return len(self.times_s)

    @property
    def duration_s(self) -> float:
        return self.times_s[-1] if self.times_s else 0.0

    @property
    def requests_s(self) -> float:
        """One over the mean interval; without any, as if all came within a second."""
        spread = self.times_s[-1] - self.times_s[0] if self.times_s else 0.0
        return (len(self) - 1) / spread if spread > 0 else float(len(self))

    # --- other arrivals from these ---

    def at_rate(self, scale: float) -> Arrivals:
        """The same requests, `scale` times as fast."""
        if scale == 1:
            return self
        times = tuple(each / scale for each in self.times_s)
        return replace(self, times_s=times, words=f"{self.words}, at {scale:.3g} x this rate")

    def variation(self, number: int) -> Arrivals:
        """The same lengths, times and sharing with other tokens: nothing of it is in a cache that has seen the rest."""
        if number == 0:
            return self
        size = self.vocab_size or 1 + max(
            (max(each) for each in self.prompts if each and isinstance(each, list)), default=0
        )
        shift = Random(f"variation {number}").randrange(1, max(2, size))
        return replace(self, prompts=tuple(_varied(each, number, shift, size) for each in self.prompts))

    def lasting(self, seconds: float) -> Arrivals:
        """Cut to `seconds`, or repeated (as variations) until then. At least one request is left."""
        if not self.times_s or seconds <= 0:
            return self
        period = len(self) / self.requests_s
        number_of_rounds = max(1, min(_MAX_REQUESTS // len(self) + 1, round(seconds / period + 0.5)))
        rounds = [self.variation(number) for number in range(number_of_rounds)]
        times = [number * period + each for number in range(number_of_rounds) for each in self.times_s]
        prompts = [prompt for each in rounds for prompt in each.prompts]
        lengths = list(self.output_lens) * number_of_rounds
        count = max(1, sum(each <= seconds for each in times))
        return replace(
            self, times_s=tuple(times[:count]), prompts=tuple(prompts[:count]), output_lens=tuple(lengths[:count])
        )

    def at_once(self, count: int) -> Arrivals:
        """`count` of the requests, repeated if need be, all sent at the start: what a server computes at most."""
        longer = self.lasting(2 * (count + len(self)) / self.requests_s) if len(self) < count else self
        found = longer.prompts[:count]
        return replace(
            self,
            times_s=(0.0,) * len(found),
            prompts=found,
            output_lens=longer.output_lens[:count],
            words=f"{len(found)} requests at once",
            has_rate=True,
        )

    # --- where arrivals come from ---

    @staticmethod
    def from_trace(path: Path, vocab_size: int, limits: ReplayLimits, *, rate: float = 0.0, seed: int = 0) -> Arrivals:
        """A trace in any format that `simulate` and `bench serve` read, or the folder of a traffic log. `rate`:
        requests per second of a trace without times; 0: nobody states one."""
        rows, block_tokens, timed = recorded_rows(path, seed)
        if timed:
            return Arrivals.from_rows(rows, block_tokens, path.name, vocab_size, limits, seed)
        times = gamma_offsets(len(rows), rate or _NOMINAL_RATE, 1.0, seed)
        rows = [(time, *row[1:]) for time, row in zip(times, rows, strict=True)]
        drawn = Arrivals.from_rows(rows, block_tokens, path.name, vocab_size, limits, seed)
        words = drawn.words if rate else f"{len(drawn)} requests of {path.name}, {_FREE_RATE}"
        return replace(drawn, words=words, has_rate=rate > 0)

    @staticmethod
    def from_prompts(
        requests: Sequence[tuple[list[int] | str, int]],
        rate: float,
        name: str,
        limits: ReplayLimits,
        vocab_size: int = 0,
        seed: int = 0,
    ) -> Arrivals:
        """(prompt, output length) of a file, sent at random times. `rate`: 0 where nobody states one."""
        prompts, lengths = [prompt for prompt, _ in requests], [length for _, length in requests]
        drawn = Arrivals.poisson(prompts, lengths, rate or _NOMINAL_RATE, vocab_size=vocab_size, seed=seed)
        how = f"{rate:g} a second" if rate else _FREE_RATE
        drawn = replace(drawn, words=f"{len(prompts)} requests of {name}, {how}, at random times", has_rate=rate > 0)
        return drawn.at_rate(limits.rate_scale if rate else 1.0).lasting(limits.seconds)

    @staticmethod
    def poisson(
        prompts: Sequence[list[int] | str],
        output_lens: Sequence[int],
        rate: float,
        *,
        vocab_size: int = 0,
        seed: int = 0,
    ) -> Arrivals:
        """Arrivals of a Poisson process, scaled so that their mean rate is exactly `rate`."""
        if not 0 < rate < float("inf"):
            raise UserError(f"--rate is {rate:g}", "give requests per second, more than 0")
        if not prompts:
            raise UserError("there are no prompts", "give at least one")
        times = gamma_offsets(len(prompts), rate, 1.0, seed)
        words = f"{len(prompts)} requests, {rate:g} a second at random times"
        return Arrivals(tuple(times), tuple(prompts), tuple(output_lens), words, vocab_size)

    @staticmethod
    def from_rows(
        rows: Iterable[Row], block_tokens: int, name: str, vocab_size: int, limits: ReplayLimits, seed: int = 0
    ) -> Arrivals:
        """The busiest window of the rows, at the rate and lengths that the limits say."""
        scale = limits.length_scale
        scaled = sorted(scaled_rows(rows, scale), key=lambda row: row[0])
        fitting = [row for row in scaled if not limits.context or row[1] + row[2] <= limits.context]
        left_out = len(scaled) - len(fitting)
        if not fitting or left_out > _MAX_LEFT_OUT * len(scaled):
            raise UserError(
                f"{left_out} of the {len(scaled)} requests of {name} are longer than the context of {limits.context}",
                "give --length-scale, or a larger --context" if scaled else "give a trace with requests",
            )
        begin, end = busiest_window(
            [row[0] for row in fitting], [row[1] + row[2] for row in fitting], limits.seconds * limits.rate_scale
        )
        chosen = fitting[begin:end]
        prompt = prompt_maker(vocab_size, max(1, round(block_tokens * scale)), seed)
        words = _words(fitting, chosen, name, limits) + (f", {left_out} too long left out" if left_out else "")
        return Arrivals(
            tuple((row[0] - chosen[0][0]) / limits.rate_scale for row in chosen),
            tuple(prompt(begin + number, row[1], row[3]) for number, row in enumerate(chosen)),
            tuple(row[2] for row in chosen),
            words,
            vocab_size,
        )


def recorded_rows(path: Path, seed: int = 0) -> tuple[list[Row], int, bool]:
    """(rows, tokens of one of their blocks, whether they have times) of a trace or of a traffic log's folder."""
    if path.is_dir():
        return list(log_rows(read_traffic_log(path))), LOG_BLOCK_TOKENS, True
    trace = open_trace(str(path), seed)
    arrivals = trace.arrivals()
    rows = [(each.ms / 1000, each.prompt_tokens, each.output_tokens, list(each.blocks)) for each in arrivals]
    return rows, BLOCK_TOKENS, trace.timed


def scaled_rows(rows: Iterable[Row], scale: float) -> list[Row]:
    return [
        (seconds, max(1, round(prompt * scale)), max(1, round(output * scale)), blocks)
        for seconds, prompt, output, blocks in rows
    ]


def busiest_window(times: Sequence[float], tokens: Sequence[int], seconds: float) -> tuple[int, int]:
    """[begin, end) of the requests within some `seconds` that have the most tokens together; the first such window."""
    best, best_tokens = (0, 0), -1
    end = total = 0
    for begin, time in enumerate(times):
        while end < len(times) and times[end] <= time + seconds and end - begin < _MAX_REQUESTS:
            total += tokens[end]
            end += 1
        if total > best_tokens:
            best, best_tokens = (begin, end), total
        total -= tokens[begin]
    return best


def _words(rows: Sequence[Row], chosen: Sequence[Row], name: str, limits: ReplayLimits) -> str:
    whole = rows[-1][0] - rows[0][0]
    words = f"{len(chosen)} requests of {name}"
    if len(chosen) < len(rows):
        window = limits.seconds * limits.rate_scale
        density = (len(chosen) / window) / (len(rows) / whole) if whole else 1.0
        words += f": the busiest {window:.3g} s of {whole:,.0f} s ({density:.2g} x its mean rate)"
    if limits.rate_scale != 1:
        words += f", at {limits.rate_scale:.3g} x its rate"
    return words + (f", lengths x {limits.length_scale:g}" if limits.length_scale != 1 else "")


def _varied(prompt: list[int] | str, number: int, shift: int, vocab_size: int) -> list[int] | str:
    if isinstance(prompt, str):
        return f"({number}) {prompt}"
    return [(token_id + shift) % vocab_size for token_id in prompt]
