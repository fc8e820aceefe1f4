"""`tokenmill optimize`: find the cheapest deployment that keeps its quality, by measurement."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli.options import DEFAULT_MODEL, AsJson, Model, Verbose, engine_options
from tokenmill.cli.output import emit
from tokenmill.cli.quantize import parse_share
from tokenmill.cli.screens.optimize import optimize_screen
from tokenmill.config import EngineConfig, parse_count
from tokenmill.errors import UserError

if TYPE_CHECKING:
    from tokenmill.optimize.results import Outcome

_Tokens = Annotated[int, typer.Option(parser=parse_count, metavar="TOKENS")]


def parse_saving(text: str | float) -> float:
    """ "-60%" or -0.6 -> -0.6."""
    if isinstance(text, float | int):
        return float(text)
    return -parse_share(text.removeprefix("-"))


@engine_options(without=("concurrency", "batch_tokens", "kv_cache_dtype"))
def optimize(
    model: Model = DEFAULT_MODEL,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory to write. Required.")] = None,
    target_cost: Annotated[float, typer.Option(parser=parse_saving, metavar="-60%", help="Cost change wanted.")] = -0.6,
    max_quality_loss: Annotated[
        float, typer.Option(parser=parse_share, metavar="1%", help="Maximum rise of perplexity.")
    ] = 0.01,
    input_len: _Tokens = 128,
    output_len: _Tokens = 64,
    concurrency: Annotated[int, typer.Option(help="Concurrent requests.")] = 8,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help='Your prompts: {"prompt": ..., "output_tokens": N}.')
    ] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="A trace: Azure CSV or Mooncake jsonl.")] = None,
    length_scale: Annotated[float, typer.Option(help="Multiply the lengths of a trace.")] = 1.0,
    price: Annotated[float, typer.Option(help="Dollars per hour of this machine. Default: the catalog.")] = -1.0,
    minutes: Annotated[float, typer.Option(help="Time budget for measuring.")] = 8.0,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="Text to measure quality on.")] = None,
    gpu: Annotated[
        list[str] | None, typer.Option(metavar="NAME[xN]", help="Also project the result to this device. Repeatable.")
    ] = None,
    candidates: Annotated[
        list[str] | None, typer.Option(metavar="NAMES", help="Only these weights: Q4_K_M,gptq-4,stored,...")
    ] = None,
    kv_cache_dtypes: Annotated[list[str] | None, typer.Option(metavar="NAMES", help="Only these KV dtypes.")] = None,
    runs: Annotated[int, typer.Option(help="Alternating runs of finalists and baseline.")] = 5,
    quality_tokens: _Tokens = 12288,
    restart: Annotated[bool, typer.Option("--restart", help="Discard an earlier run's measurements.")] = False,
    as_json: AsJson = False,
    _verbose: Verbose = False,
    *,
    engine: EngineConfig,
) -> None:
    """Cut the cost of a token by measurement: quantize, prove, benchmark, choose, and write the artefact and a report.

    The same command run again goes on where it stopped. Ctrl-C leaves a report of what is known so far.
    """
    if out is None:
        raise UserError("no output is given", "give a directory, as in: tokenmill optimize smollm2 --out cheaper")
    from tokenmill.checkpoint.open import open_checkpoint
    from tokenmill.checkpoint.sources import resolve
    from tokenmill.optimize.job import OptimizeJob
    from tokenmill.optimize.job import optimize as run
    from tokenmill.optimize.loop import Effort
    from tokenmill.optimize.traffic import TrafficRequest

    context = min(256, open_checkpoint(resolve(model).path).description.context_length)
    job = OptimizeJob(
        model=model,
        out=out,
        target_cost=target_cost,
        max_quality_loss=max_quality_loss,
        traffic=TrafficRequest(input_len, output_len, concurrency, prompts, trace, length_scale),
        price=None if price == -1.0 else price,
        text=text,
        gpus=tuple(gpu or ()),
        candidates=tuple(candidates or ()),
        kv=tuple(kv_cache_dtypes or ()),
        effort=Effort(60 * minutes, runs, windows=max(1, quality_tokens // context), context=context),
        engine=engine,
        restart=restart,
        command=shlex.join(["tokenmill", *sys.argv[1:]]),
    )
    outcome = run(job, _Progress(60 * minutes))
    result = _summary(outcome, out)
    emit(result, as_json, lambda: optimize_screen(result, outcome.candidates))


def _summary(outcome: Outcome, out: Path) -> dict[str, Any]:
    chosen, base = outcome.chosen, outcome.baseline
    speed, quality = (chosen.speed, chosen.quality) if chosen else (None, None)
    return {
        "chosen": chosen.name if chosen else "baseline",
        "cost_reduction": outcome.cost_reduction,
        "cost_reduction_low": 1 - speed.high if speed else None,
        "cost_reduction_high": 1 - speed.low if speed else None,
        "quality_loss": outcome.quality_loss if chosen else 0.0,
        "quality_loss_high": quality.loss_high if quality else None,
        "kld_mean": quality.kld_mean if quality else None,
        "target_met": outcome.target_met,
        "tied": outcome.tied,
        "reason": outcome.reason,
        "state": outcome.state,
        "baseline": base.name if base else None,
        "dollars_per_million_output": chosen.dollars_per_million_output if chosen else None,
        "baseline_dollars_per_million_output": base.dollars_per_million_output if base else None,
        "output_tok_s": speed.output_tok_s if speed else None,
        "baseline_output_tok_s": base.speed.output_tok_s if base and base.speed else None,
        "seconds": outcome.seconds,
        "results": str(out / "results.json"),
        "report": str(out / "report.html"),
        "serve": outcome.launch_lines.get("tokenmill", ""),
    }


class _Progress:
    """A line of progress on stderr: redrawn on a terminal, one line a step elsewhere."""

    def __init__(self, budget: float) -> None:
        self._began = time.monotonic()
        self._budget = budget

    def __call__(self, what: str, share: float) -> None:
        spent = time.monotonic() - self._began
        left = max(0.0, min(self._budget - spent, spent / share - spent if share > 0.02 else self._budget))
        if sys.stderr.isatty():
            filled = "#" * round(24 * share)
            print(f"\r\033[K[{filled:<24}] {what}, about {left:.0f} s left", end="", file=sys.stderr)
            if share >= 1:
                print(file=sys.stderr)
        else:
            print(f"{spent:6.0f} s  {what}", file=sys.stderr)
        sys.stderr.flush()
