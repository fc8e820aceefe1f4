"""`tokenmill train-draft`: a small head that drafts for a model, trained on a text and the model's own outputs."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli.options import DEFAULT_MODEL, AsJson, Model, Verbose, engine_options
from tokenmill.cli.output import emit
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError

if TYPE_CHECKING:
    from tokenmill.engine.llm import LLM

_CACHE_FLAGS = ("kv_policy", "kv_host_memory", "kv_disk", "kv_disk_size", "kv_redis", "kv_budget_policy", "kv_budget")
_UNUSED = ("speculate", "draft_tokens", "scheduling", "prefix_caching", *_CACHE_FLAGS)


@engine_options(without=_UNUSED)
def train_draft(
    model: Model = DEFAULT_MODEL,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text like what the model will see. Required.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write the head. Required.")] = None,
    kind: Annotated[
        str, typer.Option(help="eagle: each guess builds on the last; medusa: all guesses at once.")
    ] = "eagle",
    depth: Annotated[int, typer.Option(help="Tokens to guess ahead.")] = 4,
    width: Annotated[int, typer.Option(help="Inner width of an eagle head; 0: twice the hidden size.")] = 0,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 600,
    batch: Annotated[int, typer.Option(help="Positions in a step.")] = 1024,
    learning_rate: Annotated[float, typer.Option(help="Its peak.")] = 1e-3,
    tokens: Annotated[
        int, typer.Option(help="Tokens to train on, half of them the model's own continuations.")
    ] = 200_000,
    window: Annotated[int, typer.Option(help="Tokens of a sequence: half of text, half continued.")] = 256,
    as_json: AsJson = False,
    _verbose: Verbose = False,
    *,
    engine: EngineConfig,
) -> None:
    """Train a draft head for --speculate head:DIR: reads the text, lets the model continue it, learns from both."""
    from tokenmill.engine.llm import LLM
    from tokenmill.runtime.spec.head_modules import HEADS
    from tokenmill.runtime.spec.training import TrainingPlan, read_hidden_states, save_head, train

    if text is None or out is None:
        raise UserError("--text and --out are needed", "give a text file and a directory to write to")
    if kind not in HEADS:
        raise UserError(f"there is no head of kind '{kind}'", f"use {' or '.join(HEADS)}")
    for name, value, low in (("depth", depth, 1), ("steps", steps, 1), ("batch", batch, 1), ("window", window, 16)):
        if value < low:
            raise UserError(f"--{name} is {value}", f"give at least {low}")
    plan = TrainingPlan(kind, depth, width, steps, batch, learning_rate, engine.seed)
    started = time.perf_counter()
    config = replace(engine, context=engine.context or window + 1, prefix_caching=False)
    with LLM(model, config) as llm:
        sequences = _sequences(llm, _read(text), tokens, window)
        _say(f"{sum(map(len, sequences))} tokens, half of them generated, after {time.perf_counter() - started:.0f} s")
        parts = llm.parts
        states = read_hidden_states(parts.runtime, sequences, parts.config.batch_tokens)
        if len(states.token_ids) < 20 * (depth + 2):
            raise UserError(f"{text} has too little text", "give a longer one")

        def report(step: int, loss: float) -> None:
            if step % max(1, steps // 10) == 0:
                _say(f"step {step} of {steps}: loss {loss:.3f}, {time.perf_counter() - started:.0f} s")

        head, acceptance = train(parts.runtime.model, states, plan, report)
        save_head(head, parts.runtime.model, plan, acceptance, out)
        result = {
            "path": str(out),
            "kind": kind,
            "acceptance": [round(each, 4) for each in acceptance],
            "parameters": sum(each.numel() for each in head.parameters()),
            "tokens": len(states.token_ids),
            "seconds": time.perf_counter() - started,
        }
    emit(result, as_json)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})", "give a text file") from error


def _sequences(llm: LLM, text: str, tokens: int, window: int) -> list[list[int]]:
    """Pieces of the text, each continued by the model: half of a sequence is read, half is its own output."""
    from tokenmill.types import SamplingParams

    half = window // 2
    ids = llm.parts.tokenizer.encode(text[: tokens * 8])  # no language has longer tokens on average
    pieces = [ids[begin : begin + half] for begin in range(0, len(ids) - half, half)][: max(1, tokens // window)]
    if not pieces:
        raise UserError("the text is shorter than half a window", "give a longer one or lower --window")
    params = SamplingParams(temperature=0.0, max_tokens=window - half)
    outputs = llm.generate(pieces, params, progress=True)
    return [piece + output.outputs[0].token_ids for piece, output in zip(pieces, outputs, strict=True)]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
