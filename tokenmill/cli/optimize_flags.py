"""The flags of `tokenmill optimize` as records, one per help panel, and what may not be combined.

Everything that can be refused is refused here, in one line with its remedy, before a model is opened. Knows nothing of
how the options are used. Called by cli/optimize.py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenmill.cli.quantize import parse_share
from tokenmill.config import automatic, check, option, option_fields, parse_count
from tokenmill.errors import UserError

T = TypeVar("T")
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_saving(text: str | float) -> float:
    """ "-60%" or -0.6 -> -0.6."""
    if isinstance(text, float | int):
        return float(text)
    return -parse_share(text.removeprefix("-"))


def parse_duration(text: str | float) -> float:
    """Seconds of "30s", "15min", "1h" or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h|d)?\s*", str(text).lower())
    if not match:
        raise UserError(f"'{text}' is not a duration", "write it like 30s, 15min or 1h")
    return float(match[1]) * _SECONDS[match[2] or "s"]


@dataclass(frozen=True, slots=True)
class TrafficFlags:
    trace: str = option(
        "", "Arrivals to replay: a trace that `simulate` reads (Azure CSV, Mooncake jsonl, ...).", metavar="FILE"
    )
    prompts: str = option("", 'Your prompts, one a line: {"prompt": ..., "output_tokens": N}.', metavar="FILE")
    traffic_log: str = option("", "Arrivals that `serve --traffic-log DIR` recorded.", metavar="DIR")
    input_len: int = option(
        128, "Prompt tokens of a request, without a file.", metavar="TOKENS", parse=parse_count, low=1
    )
    output_len: int = option(
        64, "Output tokens of a request, without a file.", metavar="TOKENS", parse=parse_count, low=1
    )
    concurrency: int | None = automatic(
        int, "Maximum concurrent requests. Automatic: by the device, more in a server.", metavar="REQUESTS", low=1
    )
    length_scale: float = option(1.0, "Multiply the lengths of a trace.", metavar="FACTOR")
    rate: float = option(
        0.0, "Requests per second, where the traffic has no times. 0: the highest sustained.", metavar="RATE", low=0
    )
    rate_scale: float = option(1.0, "Replay the arrivals this many times as fast.", metavar="FACTOR")
    replay_seconds: float | None = automatic(
        float, "Length of a replay: the busiest such window of the traffic. Automatic: by --minutes.", metavar="SECONDS"
    )


@dataclass(frozen=True, slots=True)
class LimitFlags:
    target_cost: float = option(
        -0.6, "Cost wanted, against the unquantized weights.", metavar="-60%", parse=parse_saving
    )
    max_quality_loss: float = option(0.01, "Maximum rise of perplexity.", metavar="1%", parse=parse_share)
    max_kld: float | None = automatic(
        float, "Maximum mean divergence. Automatic: by perplexity.", metavar="NATS", low=0
    )
    task: tuple[str, ...] = option(
        (), "Task that may not get worse, as `eval task` reads it. Repeatable.", metavar="FILE"
    )
    max_task_loss: float = option(0.02, "Maximum loss of accuracy on a task.", metavar="2%", parse=parse_share)
    ttft: tuple[str, ...] = option((), "Objective: time to first token. Repeatable.", metavar="p95=500ms")
    itl: tuple[str, ...] = option((), "Objective: time between tokens. Repeatable.", metavar="p95=40ms")
    quality: str = option(
        "on", "off: measure speed only, as for made-up weights.", choices=("on", "off"), metavar="on|off"
    )
    text: str = option("", "Text to measure quality on. Default: a built-in one.", metavar="FILE")
    quality_tokens: int = option(12288, "Tokens of text for the proof.", metavar="TOKENS", parse=parse_count, low=1)


@dataclass(frozen=True, slots=True)
class ReferenceFlags:
    today: str = option(
        "",
        'What you serve today: "vllm serve ..." or a URL. Default: this engine on the stored file.',
        metavar="COMMAND|URL",
    )
    rivals: str = option(
        "auto",
        "Other engines to measure: auto (what is installed), none, or names and URLs.",
        metavar="auto|none|NAMES",
    )
    price: float | None = automatic(
        float, "Dollars per hour of this machine. Automatic: the catalog's.", metavar="DOLLARS", low=0
    )
    gpu: tuple[str, ...] = option((), "Also project the result to this device. Repeatable.", metavar="NAME[xN]")


@dataclass(frozen=True, slots=True)
class SearchFlags:
    minutes: float = option(8.0, "Time budget for measuring.", metavar="MINUTES")
    runs: int = option(5, "Alternating runs of the final; up to 12 to tell finalists apart.", metavar="RUNS", low=1)
    candidates: tuple[str, ...] = option((), "Only these weights: Q4_K_M,gptq-4,stored,...", metavar="NAMES")
    kv_cache_dtypes: tuple[str, ...] = option((), "Only these KV dtypes.", metavar="NAMES")
    restart: bool = option(False, "Discard an earlier run's measurements.")
    watch: bool = option(False, "Repeat the search as the traffic log drifts, and propose; nothing is changed.")
    watch_interval: float = option(3600.0, "Time between looks at the log.", metavar="1h", parse=parse_duration, low=1)


PANELS: dict[str, type] = {
    "Traffic": TrafficFlags,
    "Limits": LimitFlags,
    "Baselines and rivals": ReferenceFlags,
    "Search": SearchFlags,
}


def fill(record: type[T], given: Mapping[str, Any]) -> T:
    """The record of one panel from the flags that were typed."""
    values = {}
    for spec in option_fields(record):
        if spec.name in given:
            value = given[spec.name]
            values[spec.name] = tuple(value) if spec.metadata["kind"] is tuple else value
            check(spec, values[spec.name])
    return record(**values)


def refuse_contradictions(given: Mapping[str, Any]) -> None:
    """`given`: only what was typed, so that a default contradicts nothing."""
    sources = [f"--{name.replace('_', '-')}" for name in ("trace", "prompts", "traffic_log") if name in given]
    if len(sources) > 1:
        raise UserError(f"{' and '.join(sources)} are given: the traffic has one source", "keep one of them")
    if given.get("quality") == "off":
        for name in ("task", "max_task_loss", "max_kld", "max_quality_loss", "text", "quality_tokens"):
            if name in given:
                raise UserError(f"--{name.replace('_', '-')} is given with --quality off", "drop one of them")
    _need(given, "max_task_loss", ("task",), "--task FILE")
    _need(given, "watch", ("traffic_log",), "--traffic-log DIR, as `tokenmill serve --traffic-log DIR` writes it")
    _need(given, "watch_interval", ("watch",), "--watch")
    for name in ("rate", "rate_scale", "replay_seconds"):
        _need(given, name, ("ttft", "itl"), "an objective such as --ttft p95=500ms")
        if not given.get(name, 1.0) > 0:
            raise UserError(f"--{name.replace('_', '-')} is {given[name]:g}", "give more than 0")


def _need(given: Mapping[str, Any], name: str, needed: tuple[str, ...], remedy: str) -> None:
    if name in given and not any(each in given for each in needed):
        flags = " or ".join(f"--{each.replace('_', '-')}" for each in needed)
        raise UserError(f"--{name.replace('_', '-')} is given without {flags}", f"add {remedy}")


def readable(flag: str, path: str, folder: bool = False) -> Path | None:
    """The path of a flag, if it exists; None where the flag is not given."""
    if not path:
        return None
    found = Path(path)
    if not (found.is_dir() if folder else found.is_file()):
        raise UserError(f"--{flag}: there is no {'folder' if folder else 'file'} {path}", "check the path")
    return found


def parse_rivals(text: str) -> tuple[str, ...]:
    """Names and URLs; () for none, ("auto",) for whatever is installed."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names or (len(names) > 1 and {"auto", "none"} & set(names)):
        raise UserError(f"--rivals '{text}' is no list of engines", "give auto, none, or names such as llama.cpp,vllm")
    return () if names == ("none",) else names


def parse_today(text: str) -> str:
    """A URL, or a command that a shell could split."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--today is not a command: {error}", "quote it like --today 'vllm serve MODEL'") from None
    if text and not words:
        raise UserError("--today is empty", "give a command or a URL, or leave it out")
    return text.strip()
