"""`tokenmill eval perplexity`: how well a model predicts a text."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli.options import DEFAULT_MODEL, AsJson, Model, Verbose, engine_options
from tokenmill.cli.output import emit
from tokenmill.config import EngineConfig, parse_count, parse_size

app = typer.Typer(help="Measure quality.")


@app.callback(invoke_without_command=True)
def group(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
@engine_options(without=("context",), prefix_caching=False)
def perplexity(
    model: Model = DEFAULT_MODEL,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="The text, UTF-8. Required.")] = None,
    context: Annotated[
        int, typer.Option("--context", "-c", parser=parse_count, metavar="TOKENS", help="Tokens of each chunk.")
    ] = 512,
    limit_bytes: Annotated[
        int, typer.Option(parser=parse_size, metavar="SIZE", help="Only the first bytes of the text; 0: all.")
    ] = 0,
    max_chunks: Annotated[int, typer.Option(help="Only the first chunks; 0: all.")] = 0,
    as_json: AsJson = False,
    _verbose: Verbose = False,
    *,
    engine: EngineConfig,
) -> None:
    """Perplexity by llama.cpp's protocol: chunks of --context tokens, the second half of each is scored."""
    from tokenmill.errors import UserError

    if text is None:
        raise UserError("there is no text", "give a file, as in: tokenmill eval perplexity smollm2 --text FILE")
    from tokenmill.evaluate.perplexity import PerplexityJob, measure_perplexity

    job = PerplexityJob(text, context, limit_bytes, max_chunks)
    report = measure_perplexity(model, engine, job, _say)
    emit(asdict(report), as_json)


def _say(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"chunk {done} of {total}", file=sys.stderr, flush=True)
