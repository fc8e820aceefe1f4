"""Decoding with drafts against decoding without, on the same prompts, interleaved in the same run.

    python benchmarks/speculation.py smollm2 --prompts spec_bench.jsonl [--code humaneval.jsonl]
                                        [--drafters ngram,suffix] [--batch 1,16] [--count 8]
                                        [--max-tokens 128] [--repeat 1,3] [--json]
    python benchmarks/speculation.py smollm2 --prompts spec_bench.jsonl --batch 1 --train prompts.jsonl --heads eagle:3

Prompts are rows of Spec-Bench ({"category", "turns"}): summarization, and open-ended ones (writing, roleplay, stem,
humanities, reasoning). `--code` takes rows of HumanEval and asks for each solution back with one name changed.
Greedy, to the end of the answer; times are of decoding (first token to last of the batch). A prompt is computed once,
before the clock starts, and kept in the prefix cache. Each batch of prompts then runs without and with every drafter
back to back, in alternating order, so that a noisy machine disturbs all alike; `--repeat` says how often, for each
size of batch. Drafters without a model share the plain engine, and forget all texts between two rounds over the
prompts: a round must not profit from the answers of the last one. Printed are the ratio of total decoding times (above
1 is faster), and the median and the lowest of the ratios by batch of prompts, where an answer has some length. `same`
is the share of outputs with the same tokens with and without: on a CPU all, on a GPU all but those with near ties,
which float sums in another order may decide otherwise.

`--train` first trains draft heads on the model's own answers to other prompts (benchmarks/draft_prompts.py writes some)
and measures them as drafters of the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tokenmill import LLM, SamplingParams
from tokenmill.engine.draft_training import TrainedHead, own_answers, read_prompts, seen_layers, train_head
from tokenmill.engine.outputs import RequestOutput
from tokenmill.runtime.speculation import DRAFTERS
from tokenmill.runtime.speculation.base import Target
from tokenmill.runtime.speculation.speculator import build_speculator
from tokenmill.runtime.speculation.training import TrainingPlan

_SHORT = 16  # tokens of an answer whose own ratio says nothing
_OPEN = ("writing", "roleplay", "humanities", "stem", "reasoning")


@dataclass
class Row:
    prompts: str
    batch: int
    drafter: str
    ratio: float  # decoding time without drafts over with
    median: float  # of the ratios of single batches
    lowest: float
    tok_s_without: float
    tok_s_with: float
    acceptance: float  # of the drafted tokens
    tokens_per_step: float  # of a sequence
    step_ms_without: float
    step_ms_with: float
    gain_by_engine: float  # the engine's own estimate of `ratio`
    same: float  # share of outputs with exactly the same tokens


@dataclass
class _Run:
    seconds: float
    tokens: list[list[int]]
    drafted: int = 0
    accepted: int = 0
    saved: float = 0.0


class Contender:
    """An engine, and the drafts it decodes with."""

    def __init__(self, llm: LLM, name: str) -> None:
        self.llm, self.name = llm, name
        # Drafters without a model share one engine; each of the others has an engine that was built with it.
        ready_made = _is_ready_made(name)
        self.speculator = build_speculator(self._target()) if ready_made else llm.parts.runtime.runner.speculator
        if name == "off":
            self.speculator = None

    def step_in(self) -> None:
        self.llm.parts.runtime.runner.speculator = self.speculator

    def forget(self) -> None:
        if self.speculator is not None and _is_ready_made(self.name):
            self.speculator.drafter = DRAFTERS.get(self.name).build("", self._target())

    def _target(self) -> Target:
        runtime, config = self.llm.parts.runtime, self.llm.parts.config
        return Target(runtime.model, runtime.store, runtime.executor, replace(config, speculate=self.name))


def main() -> None:
    options = _arguments()
    sets = _prompt_sets(options)
    heads = _train(options) if options.train else []
    options.drafters += [f"head:{head.path}" for head in heads]
    contenders = _contenders(options)
    params = SamplingParams(temperature=0.0, max_tokens=options.warm, ignore_eos=True)
    for contender in contenders:  # threads, memory and pages exist before the clock starts
        contender.step_in()
        contender.llm.generate(list(range(20, 40)), params)
    rows = []
    for batch, repeat in zip(options.batch, options.repeat, strict=True):
        for kind, texts in sets.items():
            runs = _measure(contenders, texts, batch, repeat, options)
            rows += [_row(kind, batch, name, runs["off"], runs[name]) for name in options.drafters]
            if not options.json:
                for row in rows[-len(options.drafters) :]:
                    print(_line(row), flush=True)
    if options.json:
        trained = [asdict(head) | {"path": str(head.path)} for head in heads]
        print(json.dumps({"model": options.model, "rows": [asdict(row) for row in rows], "heads": trained}))


def _contenders(options: argparse.Namespace) -> list[Contender]:
    engine = {"threads": options.threads or None, "context": options.context, "draft_tokens": options.draft_tokens}
    engine |= {"concurrency": max(options.batch), "device": options.device}
    lookups = [name for name in options.drafters if _is_ready_made(name)]
    shared = LLM(options.model, speculate=lookups[0] if lookups else "off", **engine)
    contenders = [Contender(shared, name) for name in ("off", *lookups)]
    with_models = [name for name in options.drafters if name not in lookups]
    return contenders + [Contender(LLM(options.model, speculate=name, **engine), name) for name in with_models]


def _is_ready_made(name: str) -> bool:
    kind = name.partition(":")[0]
    return kind in DRAFTERS and DRAFTERS.get(kind).ready_made


def _train(options: argparse.Namespace) -> list[TrainedHead]:
    """Heads of the kinds asked for, from one reading of the model's answers."""
    prompts = [prompt for path in options.train for prompt in read_prompts(path)]
    began = time.perf_counter()
    with LLM(
        options.model,
        tensors=True,
        threads=options.threads or None,
        device=options.device,
        prefix_caching=False,
        context=1024,
    ) as llm:
        plans = {name: _plan(name, options) for name in options.heads}
        layers = sorted({layer for plan in plans.values() for layer in seen_layers(llm, plan)})
        states = own_answers(llm, prompts, options.train_tokens, options.answer, layers)
        _say(f"{len(states.token_ids)} tokens generated and read in {time.perf_counter() - began:.1f} s")
        heads = []
        for name, plan in plans.items():
            heads.append(train_head(llm, states, plan, options.out / name.replace(":", "-"), _say))
            accepted = ", ".join(f"{each:.3f}" for each in heads[-1].acceptance)
            _say(f"{name}: {heads[-1].seconds:.1f} s, accepted on held-out answers by depth: {accepted}")
    return heads


def _plan(name: str, options: argparse.Namespace) -> TrainingPlan:
    """`name`: KIND[:LAYERS[:WIDTH]]."""
    kind, *numbers = name.split(":")
    layers = int(numbers[0]) if numbers else 3
    width = int(numbers[1]) if len(numbers) > 1 else options.width
    return TrainingPlan(
        kind, options.depth, width, layers, options.steps, options.positions, learning_rate=options.learning_rate
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _measure(
    contenders: list[Contender], texts: list[str], batch: int, repeat: int, options: argparse.Namespace
) -> dict[str, list[_Run]]:
    """Chunks of `batch` prompts, each by every contender in turn; the order is reversed from chunk to chunk."""
    runs: dict[str, list[_Run]] = {contender.name: [] for contender in contenders}
    params = SamplingParams(temperature=options.temperature, seed=1, max_tokens=options.max_tokens)
    chunks = [texts[begin : begin + batch] for begin in range(0, len(texts) - batch + 1, batch)]
    chunks = chunks[: max(1, options.count // batch)]
    order = list(contenders)
    for _ in range(repeat):
        for contender in contenders:
            contender.forget()
        for chunk in chunks:
            for llm in dict.fromkeys(contender.llm for contender in contenders):
                llm.parts.runtime.runner.speculator = None
                _run(llm, chunk, SamplingParams(temperature=0.0, max_tokens=1))  # into the prefix cache
            for contender in order:
                contender.step_in()
                runs[contender.name].append(_run(contender.llm, chunk, params))
            order.reverse()
    return runs


def _run(llm: LLM, texts: list[str], params: SamplingParams) -> _Run:
    stats = llm.stats
    before = (stats.num_drafted, stats.num_accepted, stats.saved_seconds)
    conversations = [[{"role": "user", "content": text}] for text in texts]
    outputs = llm.chat(conversations, params) if llm.parts.chat_template is not None else llm.generate(texts, params)
    after = (stats.num_drafted, stats.num_accepted, stats.saved_seconds)
    differences = [b - a for a, b in zip(before, after, strict=True)]
    tokens = [output.outputs[0].token_ids for output in outputs]
    return _Run(_decode_seconds(outputs), tokens, *differences)  # type: ignore[arg-type]


def _decode_seconds(outputs: list[RequestOutput]) -> float:
    first = max(output.metrics.first_token or 0.0 for output in outputs)
    return max(output.metrics.last_token or 0.0 for output in outputs) - first


def _row(kind: str, batch: int, name: str, plain: list[_Run], drafted: list[_Run]) -> Row:
    without, with_drafts = sum(run.seconds for run in plain), sum(run.seconds for run in drafted)
    num_tokens = sum(len(ids) for run in plain for ids in run.tokens)
    pairs = [a == b for x, y in zip(plain, drafted, strict=True) for a, b in zip(x.tokens, y.tokens, strict=True)]
    proposed, accepted = sum(run.drafted for run in drafted), sum(run.accepted for run in drafted)
    saved = sum(run.saved for run in drafted)
    pairs_of_runs = [(x, y) for x, y in zip(plain, drafted, strict=True) if max(map(len, x.tokens)) > _SHORT]
    ratios = [x.seconds / y.seconds for x, y in pairs_of_runs] or [without / with_drafts]
    return Row(
        prompts=kind,
        batch=batch,
        drafter=name,
        ratio=without / with_drafts,
        median=median(ratios),
        lowest=min(ratios),
        tok_s_without=num_tokens / without,
        tok_s_with=num_tokens / with_drafts,
        acceptance=accepted / max(1, proposed),
        tokens_per_step=num_tokens / max(1, num_tokens - accepted),
        step_ms_without=1e3 * without * batch / num_tokens,
        step_ms_with=1e3 * with_drafts * batch / (num_tokens - accepted),
        gain_by_engine=(with_drafts + saved) / with_drafts,
        same=sum(pairs) / len(pairs),
    )


def _prompt_sets(options: argparse.Namespace) -> dict[str, list[str]]:
    count = max(options.count, max(options.batch))
    with options.prompts.open() as lines:
        questions: list[dict[str, Any]] = [json.loads(line) for line in lines]
    sets = {
        "summarization": [each["turns"][0] for each in questions if each["category"] == "summarization"],
        "open-ended": [each["turns"][0] for each in questions if each["category"] in _OPEN],
    }
    if options.code:
        with options.code.open() as lines:
            sets["code editing"] = [_edit(json.loads(line)) for line in lines]
    return {kind: texts[:count] for kind, texts in sets.items()}


def _edit(problem: dict[str, Any]) -> str:
    name = problem["entry_point"]
    code = (problem["prompt"] + problem["canonical_solution"]).strip()
    return f"Rename the function `{name}` to `solve` and repeat the whole file:\n\n```python\n{code}\n```"


def _line(row: Row) -> str:
    return (
        f"{row.prompts:14} batch {row.batch:<3} {row.drafter[-22:]:22} {row.ratio:5.2f}x (median {row.median:.2f}, "
        f"lowest {row.lowest:.2f})  "
        f"{row.tok_s_without:7.1f} -> {row.tok_s_with:7.1f} tok/s  accepted {row.acceptance:4.0%}  "
        f"{row.tokens_per_step:.2f} tokens a step of {row.step_ms_with:.2f} ms (without {row.step_ms_without:.2f})  "
        f"own estimate {row.gain_by_engine:.2f}x  same {row.same:4.0%}"
    )


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench rows, JSON lines")
    parser.add_argument("--code", type=Path, help="HumanEval rows, JSON lines")
    parser.add_argument("--drafters", type=lambda text: text.split(","), default=None)
    parser.add_argument("--batch", type=_numbers, default=[1, 16])
    parser.add_argument("--count", type=int, default=8, help="prompts of each kind; at least a whole batch")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--draft-tokens", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeat", type=_numbers, default=[1], help="rounds over the prompts, for each --batch")
    parser.add_argument("--warm", type=int, default=8, help="tokens before the clock starts; on a GPU 100, for graphs")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--train", type=lambda text: [Path(each) for each in text.split(",")], help="prompts, JSON lines"
    )
    parser.add_argument("--train-tokens", type=int, default=400_000, help="tokens of answers to train on, at most")
    parser.add_argument("--answer", type=int, default=128, help="tokens of one answer to train on, at most")
    parser.add_argument(
        "--heads", type=lambda text: text.split(","), default=["eagle"], help="KIND[:LAYERS[:WIDTH]],..."
    )
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--width", type=int, default=0, help="inner width of an eagle head; 0: twice the hidden size")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--positions", type=int, default=1024, help="positions of a training step")
    parser.add_argument("--out", type=Path, default=Path("draft_heads"), help="where heads are written")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if len(options.repeat) == 1:
        options.repeat *= len(options.batch)
    if options.drafters is None:
        options.drafters = [] if options.train else ["ngram", "suffix"]
    return options


if __name__ == "__main__":
    main()
