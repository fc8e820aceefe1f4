"""A draft head for a model from what the model itself says: it reads texts or answers prompts, the head learns from it.

Joins the engine, which generates, with runtime/speculation/training.py, which learns. Knows no command line. Called by
`tokenmill train-draft` and benchmarks/speculation.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill.engine.llm import LLM
from tokenmill.errors import UserError
from tokenmill.runtime.speculation.head_modules import HEAD_KINDS
from tokenmill.runtime.speculation.training import TrainingPlan, planned_layers, save_head, train
from tokenmill.runtime.speculation.training_states import HiddenStates, read_hidden_states
from tokenmill.types import SamplingParams


@dataclass(frozen=True, slots=True)
class TrainedHead:
    path: Path
    kind: str
    layers: tuple[int, ...]  # of the model, that it looks at
    acceptance: list[float]  # at each depth, on sequences that were held out
    parameters: int
    tokens: int  # learned from
    seconds: float


def own_text(llm: LLM, text: str, tokens: int, window: int, layers: Sequence[int] = ()) -> HiddenStates:
    """Pieces of a text, each continued by the model: half of a sequence is read, half is its own output. `layers`:
    whose keys and values are kept too."""
    half = window // 2
    ids = llm.parts.tokenizer.encode(text[: tokens * 8])  # no language has longer tokens on average
    pieces = [ids[begin : begin + half] for begin in range(0, len(ids) - half, half)][: max(1, tokens // window)]
    if not pieces:
        raise UserError("the text is shorter than half a window", "give a longer one or lower --window")
    params = SamplingParams(temperature=0.0, max_tokens=window - half)
    outputs = llm.generate(pieces, params, progress=True)
    sequences = [piece + output.outputs[0].token_ids for piece, output in zip(pieces, outputs, strict=True)]
    return _read(llm, sequences, None, layers)


def own_answers(llm: LLM, prompts: list[str], tokens: int, length: int, layers: Sequence[int] = ()) -> HiddenStates:
    """Prompts in the model's chat template, and its greedy answers, from which alone is learned."""
    params = SamplingParams(temperature=0.0, max_tokens=length)
    if llm.parts.chat_template is None:
        raise UserError("the model has no chat template to ask prompts in", "use --text")
    asked = [[{"role": "user", "content": prompt}] for prompt in prompts[: max(1, tokens // length)]]
    # As many at a time as run together: steps without prompts are the fast ones.
    batch_size = llm.parts.config.concurrency
    waves = [llm.chat(asked[begin : begin + batch_size], params) for begin in range(0, len(asked), batch_size)]
    outputs = [output for wave in waves for output in wave]
    sequences = [list(output.prompt_token_ids) + output.outputs[0].token_ids for output in outputs]
    return _read(llm, sequences, [len(output.prompt_token_ids) - 1 for output in outputs], layers)


def read_prompts(path: Path) -> list[str]:
    """JSON lines, each an object with "prompt" (a text) or "turns" (texts, of which the first is taken)."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        prompts = [row["prompt"] if "prompt" in row else row["turns"][0] for row in rows]
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})", "give a file of JSON lines") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"{path} has a row that is no prompt ({error!r})", 'write {"prompt": "..."} per line'
        ) from error
    if not prompts or not all(isinstance(prompt, str) and prompt for prompt in prompts):
        raise UserError(f"{path} has no prompts, or an empty one", 'write {"prompt": "..."} per line')
    return prompts


def train_head(
    llm: LLM, states: HiddenStates, plan: TrainingPlan, out: Path, say: Callable[[str], None] = lambda _text: None
) -> TrainedHead:
    if plan.kind not in HEAD_KINDS:
        raise UserError(f"there is no head of kind '{plan.kind}'", f"use {' or '.join(HEAD_KINDS)}")
    learnable = int(states.learnable(plan.depth + 1).sum())
    if learnable < 20 * (plan.depth + 2):
        raise UserError("there is too little to learn from", "give more text or more prompts")
    started = time.perf_counter()

    def report(step: int, loss: object) -> None:
        if step % max(1, plan.steps // 10) == 0:
            say(f"step {step}: loss {float(loss):.3f}, {time.perf_counter() - started:.0f} s")  # type: ignore[arg-type]

    model = llm.parts.runtime.model
    head, acceptance = train(model, states, plan, report)
    save_head(head, model, plan, acceptance, out)
    size = sum(each.numel() for each in head.parameters())
    return TrainedHead(out, plan.kind, head.layers, acceptance, size, learnable, time.perf_counter() - started)


def seen_layers(llm: LLM, plan: TrainingPlan) -> tuple[int, ...]:
    """The layers whose keys and values a head of this plan must be given to learn from."""
    return planned_layers(llm.parts.runtime.model, plan)


def _read(llm: LLM, sequences: list[list[int]], firsts: list[int] | None, layers: Sequence[int]) -> HiddenStates:
    runtime, config = llm.parts.runtime, llm.parts.config
    return read_hidden_states(runtime, sequences, config.batch_tokens, config.concurrency, firsts, layers)
