"""`tokenmill bench latency | throughput | serve`: the engine on synthetic prompts, a server under load."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmill.bench.serve_job import ServeJob
from tokenmill.cli.options import DEFAULT_MODEL, AsJson, Model, Verbose, engine_options, given_options
from tokenmill.cli.output import emit
from tokenmill.cli.progress import progress_bar
from tokenmill.cli.screens.bench import latency_screen, serve_screen, throughput_screen
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError

app = typer.Typer(help="Measure speed: of the engine on synthetic prompts, of a server under load.")
_LoraMix = Annotated[
    str,
    typer.Option(
        "--lora-mix", metavar="NAME=SHARE,...", help="Share of the requests of each --lora; default: equal shares."
    ),
]
_Report = Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write a self-contained HTML report.")]


@app.callback(invoke_without_command=True)
def group(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
@engine_options(prefix_caching=False)
def latency(
    model: Model = DEFAULT_MODEL,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 512,
    output_len: Annotated[int, typer.Option(help="Tokens generated for each prompt.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Prompts in the batch.")] = 1,
    repeat: Annotated[int, typer.Option(help="Measured runs; medians are reported.")] = 3,
    warmup: Annotated[int, typer.Option(help="Runs before those, not measured.")] = 1,
    lora_mix: _LoraMix = "",
    as_json: AsJson = False,
    _verbose: Verbose = False,
    *,
    engine: EngineConfig,
) -> None:
    """One batch: how fast prompts are read (until every sequence has its first token) and how fast tokens follow."""
    from tokenmill.bench.latency import LatencyJob, measure_latency

    job = LatencyJob(input_len, output_len, batch_size, repeat, warmup, lora_mix)
    total = warmup + repeat
    with progress_bar("runs") as advance:
        result = asdict(measure_latency(model, engine, job, lambda done: advance(done, total)))
    emit(result, as_json, lambda: latency_screen(result, model))


@app.command()
@engine_options()
def throughput(
    model: Model = DEFAULT_MODEL,
    num_prompts: Annotated[int, typer.Option(help="Number of requests, all sent at once.")] = 16,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 256,
    output_len: Annotated[int, typer.Option(help="Tokens generated for each prompt.")] = 128,
    range_ratio: Annotated[float, typer.Option(help="Lengths vary uniformly by up to this share.")] = 0.0,
    shared_prefix: Annotated[int, typer.Option(help="Length of a common prefix, on top of --input-len.")] = 0,
    lora_mix: _LoraMix = "",
    report_file: _Report = None,
    as_json: AsJson = False,
    _verbose: Verbose = False,
    *,
    engine: EngineConfig,
) -> None:
    """Many requests at once: tokens per second, and how much of the KV memory in use holds no token (kv_waste)."""
    from tokenmill.bench.throughput import ThroughputJob, measure_throughput

    job = ThroughputJob(num_prompts, input_len, output_len, range_ratio, shared_prefix, lora_mix)
    found = measure_throughput(model, engine, job, progress=True)
    if report_file is not None:
        from tokenmill.bench.html import write_throughput_report

        write_throughput_report(report_file, model, found)
    result = asdict(found)
    emit(result, as_json, lambda: throughput_screen(result, model))


@app.command()
@given_options({"Load": ServeJob}, {})
def serve(
    limits: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="")] = None,
    report_file: _Report = None,
    as_json: AsJson = False,
    _verbose: Verbose = False,
    *,
    given: dict[str, Any],
) -> None:
    """Send load to any OpenAI-compatible server: throughput, TTFT, TPOT, ITL. Flags as in `vllm bench serve`."""
    from tokenmill.bench.serve import measure_serving
    from tokenmill.bench.serve_file import save
    from tokenmill.bench.serve_progress import progress_of
    from tokenmill.bench.serve_report import build_report, details

    extra = " ".join(limits or ())  # the values after the first of `--goodput a:1 b:2` arrive as arguments
    job = ServeJob.from_options(given | {"goodput": (*given.get("goodput", ()), extra)} if extra else given)
    with progress_of(job) as on_done:
        measurement = measure_serving(job, on_done)
    report = build_report(measurement)
    if job.save_result or job.save_detailed:
        path = save(report, details(measurement) if job.save_detailed else None, job)
        print(f"saved {path}", file=sys.stderr, flush=True)
    if report_file is not None:
        from tokenmill.bench.html import write_serve_report

        write_serve_report(report_file, measurement, report)
    emit(report, as_json, lambda: serve_screen(report, job.shown_metrics()))
    if not report["completed"]:
        raise UserError("no request succeeded", "the failures above say why")
