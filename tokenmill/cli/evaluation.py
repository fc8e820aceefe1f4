"""`tokenmill eval`: perplexity, divergence; tasks (evaluation_task.py) and endpoints (evaluation_endpoint.py)."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli.evaluation_endpoint import endpoint
from tokenmill.cli.evaluation_task import task
from tokenmill.cli.options import DEFAULT_MODEL, AsJson, Model, Verbose, engine_options
from tokenmill.cli.output import emit
from tokenmill.cli.progress import progress_bar
from tokenmill.cli.screens.evaluation import divergence_screen, perplexity_screen
from tokenmill.config import ADAPTER_MEMORY, EngineConfig, parse_count, parse_size

if TYPE_CHECKING:
    from tokenmill.evaluate.windows import TextJob

app = typer.Typer(help="Measure the quality of a model.")
app.command("task")(task)
app.command("endpoint")(endpoint)

Text = Annotated[Path | None, typer.Option(metavar="FILE", help="Text file, UTF-8. Required.")]
Context = Annotated[
    int, typer.Option("--context", "-c", parser=parse_count, metavar="TOKENS", help="Tokens per chunk.")
]
LimitBytes = Annotated[
    int, typer.Option(parser=parse_size, metavar="SIZE", help="Use only this much of the text; 0: all.")
]
MaxChunks = Annotated[int, typer.Option(help="Use only this many chunks; 0: all.")]
Protocol = Annotated[
    str,
    typer.Option(
        metavar="llama.cpp|stride",
        help="llama.cpp: the second half of each chunk is scored. stride: sliding windows, every token is scored once.",
    ),
]
Stride = Annotated[
    int, typer.Option(help="Tokens from one window of `--protocol stride` to the next; 0: --context, no overlap.")
]


@app.callback(invoke_without_command=True)
def group(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
@engine_options(without=("context", *ADAPTER_MEMORY), prefix_caching=False)
def perplexity(
    model: Model = DEFAULT_MODEL,
    text: Text = None,
    context: Context = 512,
    limit_bytes: LimitBytes = 0,
    max_chunks: MaxChunks = 0,
    protocol: Protocol = "llama.cpp",
    stride: Stride = 0,
    as_json: AsJson = False,
    _verbose: Verbose = False,
    *,
    engine: EngineConfig,
) -> None:
    """Perplexity of a text: by llama.cpp's protocol (the second half of each chunk is scored) or by sliding windows."""
    from tokenmill.evaluate.perplexity import measure_perplexity

    job = _text_job("perplexity smollm2", text, context, limit_bytes, max_chunks, protocol, stride)
    with progress_bar("chunks") as advance:
        result = asdict(measure_perplexity(model, engine, job, advance))
    emit(result, as_json, lambda: perplexity_screen(result, model, job.text.name))


@app.command()
@engine_options(without=("context", *ADAPTER_MEMORY), prefix_caching=False)
def divergence(
    model: Model = DEFAULT_MODEL,
    reference: Annotated[
        str, typer.Option(metavar="MODEL|FILE", help="The model to compare with, or its logit cache. Required.")
    ] = "",
    text: Text = None,
    context: Context = 512,
    limit_bytes: LimitBytes = 0,
    max_chunks: MaxChunks = 0,
    protocol: Protocol = "llama.cpp",
    stride: Stride = 0,
    cache: Annotated[
        bool,
        typer.Option(
            "--cache/--no-cache",
            help="Keep the reference's log-probabilities for the next time, or run both models side by side.",
        ),
    ] = True,
    as_json: AsJson = False,
    _verbose: Verbose = False,
    *,
    engine: EngineConfig,
) -> None:
    """How far a model's predictions are from a reference's: KL divergence, top-1 agreement, ratio of perplexities."""
    from tokenmill.errors import UserError
    from tokenmill.evaluate.divergence import measure_divergence

    example = "divergence my-quantized-model --reference smollm2"
    if not reference:
        raise UserError("no reference is given", f"give a model, as in: tokenmill eval {example} --text FILE")
    job = _text_job(example, text, context, limit_bytes, max_chunks, protocol, stride)
    with progress_bar("chunks") as advance:
        report = measure_divergence(
            model, reference, job.cut, engine, context=context, cached=cache, on_progress=advance
        )
    result = asdict(report)
    emit(result, as_json, lambda: divergence_screen(result, model))


def _text_job(
    example: str, text: Path | None, context: int, limit_bytes: int, max_chunks: int, protocol: str, stride: int
) -> TextJob:
    from tokenmill.errors import UserError
    from tokenmill.evaluate.windows import TextJob

    if text is None:
        raise UserError("no text is given", f"give a file, as in: tokenmill eval {example} --text FILE")
    return TextJob(text, context, limit_bytes, max_chunks, protocol, stride)
