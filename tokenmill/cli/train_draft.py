"""`tokenmill train-draft`: a small head that drafts for a model, trained on a text and the model's own outputs."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli.options import DEFAULT_MODEL, AsJson, Model, Verbose, engine_options
from tokenmill.cli.output import emit
from tokenmill.cli.screens.train_draft import train_draft_screen
from tokenmill.config import ADAPTER_OPTIONS, EngineConfig
from tokenmill.errors import UserError

_CACHE_FLAGS = (
    *("kv_policy", "kv_host_memory", "kv_disk", "kv_disk_size", "kv_redis", "kv_secret_file"),
    *("kv_budget_policy", "kv_budget"),
)
_STEP_FLAGS = ("speculate", "draft_tokens", "jump_forward", "itl", "scheduling", "prefix_caching")
_UNUSED = (*_STEP_FLAGS, *_CACHE_FLAGS, *ADAPTER_OPTIONS)


@engine_options(without=_UNUSED)
def train_draft(
    model: Model = DEFAULT_MODEL,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text like the expected traffic, which the model continues.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='Prompts to answer: JSON lines {"prompt": ...} or {"turns": ...}.'),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write the head. Required.")] = None,
    kind: Annotated[
        str, typer.Option(help="eagle: each draft token builds on the last; medusa: all at once.")
    ] = "eagle",
    depth: Annotated[int, typer.Option(help="Tokens to draft ahead.")] = 4,
    width: Annotated[int, typer.Option(help="Intermediate size of an eagle head; 0: twice the hidden size.")] = 0,
    layers: Annotated[
        int, typer.Option(help="Layers of the model whose keys and values an eagle head attends to; 0: none.")
    ] = 3,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 600,
    batch: Annotated[int, typer.Option(help="Positions per training step.")] = 1024,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    tokens: Annotated[
        int, typer.Option(help="Tokens of text, half of them the model's own continuations; or of its answers.")
    ] = 200_000,
    window: Annotated[
        int, typer.Option(help="Tokens of a sequence: half of text, half continued; an answer has half.")
    ] = 256,
    as_json: AsJson = False,
    _verbose: Verbose = False,
    *,
    engine: EngineConfig,
) -> None:
    """Train a draft head for --speculate head:DIR: reads the text, lets the model continue it, learns from both."""
    from tokenmill.engine.draft_training import own_answers, own_text, read_prompts, seen_layers, train_head
    from tokenmill.engine.llm import LLM
    from tokenmill.runtime.speculation.head_modules import HEAD_KINDS
    from tokenmill.runtime.speculation.training import TrainingPlan

    if (text is None) == (prompts is None) or out is None:
        raise UserError("--out and one of --text and --prompts are needed", "give a file and a directory to write to")
    if kind not in HEAD_KINDS:
        raise UserError(f"there is no head of kind '{kind}'", f"use {' or '.join(HEAD_KINDS)}")
    bounds = [("depth", depth, 1), ("layers", layers, 0), ("steps", steps, 1), ("batch", batch, 1)]
    for name, value, low in (*bounds, ("window", window, 16)):
        if value < low:
            raise UserError(f"--{name} is {value}", f"give at least {low}")
    plan = TrainingPlan(kind, depth, width, layers, steps, batch, learning_rate, engine.seed)
    started = time.perf_counter()
    source = _read(text) if text is not None else ""
    asked = read_prompts(prompts) if prompts is not None else []
    longest = 0 if asked else window + 1
    with LLM(model, replace(engine, prefix_caching=False).fill("longest text", context=longest), tensors=True) as llm:
        seen = seen_layers(llm, plan)
        if asked:
            states = own_answers(llm, asked, tokens, window // 2, seen)
        else:
            states = own_text(llm, source, tokens, window, seen)
        _say(f"{len(states.token_ids)} tokens read after {time.perf_counter() - started:.0f} s")
        trained = train_head(llm, states, plan, out, _say)
    result = {
        "path": str(out),
        "kind": kind,
        "layers": list(trained.layers),
        "acceptance": [round(each, 4) for each in trained.acceptance],
        "parameters": trained.parameters,
        "tokens": trained.tokens,
        "seconds": time.perf_counter() - started,
    }
    emit(result, as_json, lambda: train_draft_screen(result, model))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})", "give a text file") from error


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
