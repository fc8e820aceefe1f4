"""What drafts of a given acceptance are worth on one GPU: an 8B shape with made-up weights, drafts right so often.

    python benchmarks/simulated_drafts.py [--config FILE] [--variant bf16] [--rows 1,4,16,64] [--acceptance 0.6,0.7,0.8]
                                          [--drafts lookup,head,model] [--depth 3] [--tokens 192] [--out FILE]

The weights are made up so that the model counts: the token after t is t + 1, by a margin that no rounding reaches. A
draft is then known to be right without asking the model, and is made wrong with the probability that is asked for, each
token by itself; the engine verifies as always, and chooses by itself how many tokens to verify and whether at all.
What the drafts cost is real too:

* lookup: nothing, as n-grams and suffixes nearly do;
* head: a one-layer head of the EAGLE kind, as wide as a layer of the model, that attends to the pages of its last layer
  and guesses `--depth` tokens inside the captured step; its own (random) guesses are computed and replaced;
* model: a model of half a billion weights that counts too, in graphs of its own.

Greedy; prompts of 128 tokens that are in the prefix cache. Steps are captured before, as a server does; for each
acceptance and number of sequences two runs to warm up (measured costs, steps with a head) and a timed one. Printed:
tokens a second with drafts and without, drafted tokens of a sequence and step, the share that held, milliseconds of a
step, and whether all tokens were the right ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import gpu_vs_vllm
from benchmarks.gpu_vs_vllm import CONFIG, VARIANTS, write_model
from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint.open import open_source
from tokenmill.model.loader import LoadedModel, load_model
from tokenmill.runtime.executors.base import Draft, Executor, StepGuesser
from tokenmill.runtime.speculation.base import Drafter, Target
from tokenmill.runtime.speculation.draft_model import DraftModel
from tokenmill.runtime.speculation.head_modules import build_head
from tokenmill.runtime.speculation.heads import HeadDrafter
from tokenmill.runtime.speculation.speculator import Speculator, captured_sizes
from tokenmill.runtime.speculation.training import TrainingPlan, save_head
from tokenmill.types import Batch, ScheduledTokens

# The shape of Qwen2.5-0.5B with the target's vocabulary.
SMALL = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
OPTIONS = gpu_vs_vllm.OPTIONS | {"context": 2048}
PROMPT = 128
_EMBEDDING = 16.0  # standard deviation: what layers with made-up weights add is about ten


class Guesses:
    """What is drafted after each token: the next number, or a wrong one."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self.after = [0] * vocabulary
        self.on_device = torch.zeros(vocabulary, dtype=torch.int64, device=device)
        self.acceptance = 0.0

    def set(self, acceptance: float) -> None:
        draw, size = random.Random(1), self._vocabulary
        self.acceptance = acceptance
        self.after = [(token + (1 if draw.random() < acceptance else 9)) % size for token in range(size)]
        self.on_device.copy_(torch.tensor(self.after))

    def draft(self, last: int, length: int) -> Draft:
        ids = [last]
        for _ in range(length):
            ids.append(self.after[ids[-1]])
        return Draft(ids[1:], [self.acceptance] * length)


class LookedUp(Drafter):
    name = "lookup"

    def __init__(self, guesses: Guesses) -> None:
        self._guesses = guesses

    @classmethod
    def build(cls, argument: str, target: Target) -> LookedUp:
        raise NotImplementedError

    def draft(self, rows: Sequence[ScheduledTokens], limits: Sequence[int]) -> list[Draft]:
        pairs = zip(rows, limits, strict=True)
        return [self._guesses.draft(row.request.token_ids[-1], limit) for row, limit in pairs]


class ByModel(LookedUp):
    """A real draft model, whose tokens are replaced."""

    name = "model"
    computes = True

    def __init__(self, guesses: Guesses, model: DraftModel) -> None:
        super().__init__(guesses)
        self._model = model

    def draft(self, rows: Sequence[ScheduledTokens], limits: Sequence[int]) -> list[Draft]:
        drafts = self._model.draft(rows, limits)
        return super().draft(rows, [len(draft.token_ids) for draft in drafts])


class InStep:
    """A real head in the captured step, whose guesses are replaced."""

    def __init__(self, guesses: Guesses, head: StepGuesser) -> None:
        self.depth, self._guesses, self._head = head.depth, guesses, head

    def note(self, batch: Batch) -> None:
        self._head.note(batch)

    def guess(self, hidden: Tensor, last: Tensor, batch: Batch) -> Tensor:
        self._head.guess(hidden, last, batch)
        found = [last]
        for _ in range(self.depth):
            found.append(self._guesses.on_device[found[-1]])
        return torch.stack(found[1:], 1)


def make_counting(model: LoadedModel) -> None:
    """Token t is followed by t + 1: its row of the head is the embedding of t, which layers hardly change."""
    table: Any = model.table
    kernel: Any = model.decoder.head.kernel
    table.normal_(std=_EMBEDDING, generator=torch.Generator(table.device).manual_seed(0))
    kernel.run.weight.copy_(table.roll(1, 0) / _EMBEDDING**2)


def start(kind: str, folder: Path, config: dict[str, Any], options: argparse.Namespace) -> tuple[LLM, Guesses]:
    """An engine with drafts of this kind."""
    path = folder / "target"
    if not path.exists():
        write_model(path, config)
    memory = options.memory or max(options.rows) * (PROMPT + options.tokens + 256) * kv_bytes(config)
    common = (
        OPTIONS
        | VARIANTS[options.variant]
        | {"memory": memory, "jump_forward": False, "concurrency": max(options.rows)}
    )
    if kind == "head":
        write_head(folder / "head", path, common, options.depth)
        llm = LLM(path, speculate=f"head:{folder / 'head'}", draft_tokens=options.depth, **common)
    else:
        llm = LLM(path, speculate="ngram", **common)
    runtime = llm.parts.runtime
    make_counting(runtime.model)
    guesses = Guesses(config["vocab_size"], runtime.model.device)
    speculator: Any = runtime.runner.speculator
    if kind == "head":
        executor: Any = runtime.executor
        executor._guesser = InStep(guesses, executor._guesser)
        replace_first_guesses(speculator.drafter, guesses)
    elif kind == "model":
        small = write_model(folder / "small", config | SMALL)
        target = Target(runtime.model, runtime.store, runtime.executor, llm.parts.config)
        device, context = runtime.model.device, llm.parts.config.context
        loaded = load_model(open_source(small, "dummy"), device, context, llm.parts.config.kernels)
        make_counting(loaded)
        runtime.runner.speculator = speculate_by(ByModel(guesses, DraftModel(loaded, target)), runtime.executor)
    else:
        runtime.runner.speculator = speculate_by(LookedUp(guesses), runtime.executor)
    llm.warm_up()
    return llm, guesses


def speculate_by(drafter: Drafter, executor: Executor) -> Speculator:
    return Speculator(drafter, executor.sampler, padded=captured_sizes(executor))


def kv_bytes(config: dict[str, Any]) -> int:
    """Of one token, in 16 bits."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 4 * heads * head_dim * int(config["num_hidden_layers"])


def write_head(folder: Path, model: Path, options: dict[str, Any], depth: int) -> None:
    with LLM(model, **options) as llm:
        d = llm.parts.description
        width, last = d.intermediate_size, d.num_layers - 1
        head = build_head("eagle", d.hidden_size, depth, width, (last,), d.num_heads * d.head_dim)
        plan = TrainingPlan("eagle", depth, width)
        save_head(head, llm.parts.runtime.model, plan, [0.5] * depth, folder)


def replace_first_guesses(drafter: HeadDrafter, guesses: Guesses) -> None:
    """Those made between steps, where no step before has guessed."""
    compute = drafter.guess

    def guess(hidden: Tensor, last: Tensor, depth: int, attend: Any) -> tuple[list[list[int]], list[list[float]]]:
        compute(hidden, last, depth, attend)
        drafts = [guesses.draft(token, depth) for token in last.tolist()]
        return [draft.token_ids for draft in drafts], [draft.confidences for draft in drafts]

    drafter.guess = guess  # type: ignore[method-assign]


def run(llm: LLM, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """One batch, decoded; its figures."""
    stats = llm.stats
    before = (stats.num_steps, stats.num_drafted, stats.num_accepted)
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens))
    after = (stats.num_steps, stats.num_drafted, stats.num_accepted)
    steps, drafted, accepted = (b - a for a, b in zip(before, after, strict=True))
    times = [output.metrics for output in outputs]
    seconds = max(each.last_token or 0.0 for each in times) - max(each.first_token or 0.0 for each in times)
    rows = len(prompts)
    vocabulary = llm.parts.description.vocab_size
    right = [
        output.outputs[0].token_ids == [(prompt[-1] + 1 + n) % vocabulary for n in range(tokens)]
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    decoded = max(1, steps - 1)
    return {
        "tok_s": rows * (tokens - 1) / seconds,
        "ms": seconds / decoded * 1e3,
        "drafted": drafted / decoded / rows,
        "held": accepted / max(1, drafted),
        "right": sum(right) / rows,
    }


def measure(kind: str, llm: LLM, guesses: Guesses, options: argparse.Namespace, keep: Any) -> None:
    runner, draw = llm.parts.runtime.runner, random.Random(0)
    speculator = runner.speculator
    assert speculator is not None
    vocabulary = llm.parts.description.vocab_size
    for rows in options.rows:
        prompts = [[draw.randrange(10, vocabulary - 4096) for _ in range(PROMPT)] for _ in range(rows)]
        runner.speculator = None
        run(llm, prompts, 32)
        plain = run(llm, prompts, options.tokens)
        runner.speculator = speculator
        for acceptance in options.acceptance:
            guesses.set(acceptance)
            speculator.forget()
            for _ in range(2):
                run(llm, prompts, options.tokens)
            found = run(llm, prompts, options.tokens)
            row = {"drafts": kind, "rows": rows, "acceptance": acceptance, "without": plain["tok_s"]}
            row |= {"with": found["tok_s"], "gain": found["tok_s"] / plain["tok_s"], "step_ms": found["ms"]}
            row |= {"plain_ms": plain["ms"], "drafted": found["drafted"], "held": found["held"]}
            keep(row | {"right": min(found["right"], plain["right"])})


def show(row: dict[str, Any]) -> str:
    return (
        f"{row['drafts']:6} {row['rows']:3} sequences, {row['acceptance']:.1f}: {row['without']:8.1f} -> "
        f"{row['with']:8.1f} tok/s ({row['gain']:.2f}x)  {row['drafted']:.2f} drafted, {row['held']:4.0%} held  "
        f"{row['step_ms']:.2f} ms a step (without {row['plain_ms']:.2f})  right {row['right']:4.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="config.json of the shape (default: Llama-3.1-8B's)")
    parser.add_argument("--variant", default="bf16", choices=list(VARIANTS))
    parser.add_argument("--rows", type=lambda text: [int(each) for each in text.split(",")], default=[1, 4, 16, 64])
    parser.add_argument(
        "--acceptance", type=lambda text: [float(each) for each in text.split(",")], default=[0.6, 0.7, 0.8]
    )
    parser.add_argument("--drafts", default="lookup,head,model")
    parser.add_argument("--depth", type=int, default=3, help="tokens that the head guesses")
    parser.add_argument("--tokens", type=int, default=192, help="of each sequence")
    parser.add_argument("--memory", type=int, default=0, help="bytes of KV pages; 0: what the sequences need")
    parser.add_argument("--out", type=Path, help="file that rows are appended to, as JSON")
    options = parser.parse_args()
    config = CONFIG if options.config is None else json.loads(options.config.read_text())

    def keep(row: dict[str, Any]) -> None:
        print(show(row), flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        for kind in options.drafts.split(","):
            llm, guesses = start(kind, Path(folder), config | {"tie_word_embeddings": False}, options)
            with llm:
                measure(kind, llm, guesses, options, keep)
            del llm, guesses
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
