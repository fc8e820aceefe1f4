"""`tokenmill finetune`: a low-rank adapter trained on a text, or from the unquantized model."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli.options import DEFAULT_MODEL, AsJson, Model, Verbose
from tokenmill.cli.output import emit
from tokenmill.cli.screens.finetune import finetune_screen
from tokenmill.config import parse_count
from tokenmill.errors import UserError


def finetune(
    model: Model = DEFAULT_MODEL,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text, or .jsonl of texts, chats or prompts. Required.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write the PEFT adapter. Required.")] = None,
    method: Annotated[
        str, typer.Option(help="lora: on a float base; qlora: on a quantized one. auto: by the base.")
    ] = "auto",
    rank: Annotated[int, typer.Option(help="Rank of the adapter.")] = 16,
    alpha: Annotated[float, typer.Option(help="Scale of the adapter times its rank. 0: twice the rank.")] = 0.0,
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Modules to adapt, such as q_proj. Repeatable. Default: attention and MLP."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 200,
    batch: Annotated[int, typer.Option(help="Rows per step.")] = 8,
    length: Annotated[
        int, typer.Option(parser=parse_count, metavar="TOKENS", help="Tokens per row. 0: 512, or the model's context.")
    ] = 0,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-4,
    eval_data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Held-out text. Default: the last tenth of the data.")
    ] = None,
    eval_every: Annotated[int, typer.Option(help="Steps between held-out losses. 0: a tenth of all.")] = 0,
    save_every: Annotated[int, typer.Option(help="Steps between saved states, from which a killed run resumes.")] = 25,
    distill_from: Annotated[
        str, typer.Option(metavar="MODEL", help="Learn this model's predictions: what quantization lost.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Of the first factors and the order of rows.")] = 0,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads. 0: all.")] = 0,
    restart: Annotated[bool, typer.Option("--restart", help="Discard the unfinished work of an earlier run.")] = False,
    as_json: AsJson = False,
    _verbose: Verbose = False,
) -> None:
    """Train an adapter on one device, the base frozen in its stored format. A killed run resumes where it stopped."""
    if data is None or out is None:
        raise UserError("--data and --out are needed", "give a text to learn from and a directory to write to")
    from tokenmill.finetune.job import FinetuneJob
    from tokenmill.finetune.job import finetune as run
    from tokenmill.finetune.model import AdapterPlan

    job = FinetuneJob(
        model=model,
        data=data,
        out=out,
        method=method,
        adapter=AdapterPlan(rank, alpha, tuple(target or AdapterPlan().targets), seed),
        steps=steps,
        batch=batch,
        length=length,
        learning_rate=learning_rate,
        eval_data=eval_data,
        eval_every=eval_every,
        save_every=save_every,
        distill_from=distill_from,
        device=device,
        threads=threads,
        restart=restart,
    )
    result = asdict(run(job, _say))
    emit(result, as_json, lambda: finetune_screen(result))


def _say(step: int, steps: int, loss: float, held_out: float | None) -> None:
    measured = "" if held_out is None else f", held out {held_out:.4f}"
    if held_out is not None or step == 1:
        print(f"step {step} of {steps}: loss {loss:.4f}{measured}", file=sys.stderr, flush=True)
