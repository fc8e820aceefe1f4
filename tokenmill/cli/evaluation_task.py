"""`tokenmill eval task`: how many items of a benchmark file a model gets right."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli.options import DEFAULT_MODEL, AsJson, Model, Verbose, engine_options
from tokenmill.cli.output import emit
from tokenmill.cli.progress import progress_bar
from tokenmill.cli.screens.evaluation import task_screen
from tokenmill.config import ADAPTER_MEMORY, EngineConfig


@engine_options(without=ADAPTER_MEMORY)
def task(
    model: Model = DEFAULT_MODEL,
    task: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Items, one JSON object per line. Required.")
    ] = None,
    kind: Annotated[str, typer.Option(help="Kind of task. Empty: by the fields of the items.")] = "",
    limit: Annotated[int, typer.Option(help="Use only this many items; 0: all.")] = 0,
    shots: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Items of the same kind to take examples from (mmlu, gsm8k).")
    ] = None,
    num_shots: Annotated[int | None, typer.Option(help="Examples before each question. Default: by the kind.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat", help="Put prompts into the chat template. Default: for ifeval.", show_default=False
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Maximum tokens of a generated answer; 0: the default of the kind.")
    ] = 0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result of each item, as jsonl.")] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Results of another model, from --out, to compare with.")
    ] = None,
    reference: Annotated[
        str, typer.Option(metavar="MODEL", help="A model to put the same items to, and to compare with item by item.")
    ] = "",
    unsafe_code: Annotated[
        bool, typer.Option("--unsafe-code", help="Run programs of the model where the system cannot confine them.")
    ] = False,
    as_json: AsJson = False,
    _verbose: Verbose = False,
    *,
    engine: EngineConfig,
) -> None:
    """Accuracy on a file of items: lambada, ARC, PIQA, hellaswag, mmlu, truthfulqa, gsm8k, ifeval, humaneval.

    The kind is detected by the fields of the items. humaneval runs programs of the model, confined by the kernel.
    """
    from tokenmill.errors import UserError

    if task is None:
        raise UserError("no task is given", "give a file, as in: tokenmill eval task smollm2 --task FILE.jsonl")
    from tokenmill.evaluate.task_run import TaskJob, run_task

    job = TaskJob(task, kind, limit, shots, num_shots, chat, max_tokens, out, compare, unsafe_code)
    with progress_bar("items") as advance:
        report = run_task(model, engine, job, advance, reference)
    result = asdict(report)
    if report.comparison is None:
        del result["comparison"]
    emit(result, as_json, lambda: task_screen(result, model))
