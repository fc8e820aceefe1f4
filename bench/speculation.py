"""Decoding with drafts against decoding without, on the same prompts, interleaved in the same run.

    python bench/speculation.py smollm2 --prompts spec_bench.jsonl [--code humaneval.jsonl] [--drafters ngram,suffix]
                                        [--batch 1,16] [--count 8] [--max-tokens 128] [--repeat 2] [--json]
    python bench/speculation.py smollm2 --prompts spec_bench.jsonl --train prompts.jsonl --heads eagle,medusa --batch 1

Prompts are rows of Spec-Bench ({"category", "turns"}): summarization, and open-ended ones (writing, roleplay, stem,
humanities, reasoning). `--code` takes rows of HumanEval and asks for each solution back with one name changed.
Greedy; times are those of decoding (first token to last of the batch). Each prompt runs without and with drafts back to
back, in alternating order, so that a noisy machine disturbs both alike. The ratio is of total decoding times: above 1
is faster. `same` is the share of outputs with the same tokens with and without: on a CPU all, on a GPU all but those
with near ties, which float sums in another order may decide otherwise.

`--train` first trains draft heads on the model's own answers to other prompts (bench/draft_prompts.py writes some) and
measures them as drafters of the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tokenmill import LLM, SamplingParams
from tokenmill.engine.draft_training import TrainedHead, own_answers, read_prompts, train_head
from tokenmill.engine.outputs import RequestOutput
from tokenmill.runtime.spec.training import TrainingPlan

_OPEN = ("writing", "roleplay", "humanities", "stem", "reasoning")


@dataclass
class Row:
    prompts: str
    batch: int
    drafter: str
    ratio: float  # decoding time without drafts over with
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
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    saved: float = 0.0


def main() -> None:
    options = _arguments()
    sets = _prompt_sets(options)
    engine = {"threads": options.threads, "context": options.context, "prefix_caching": False}
    engine |= {"concurrency": max(options.batch), "device": options.device}
    heads = _train(options) if options.train else []
    options.drafters += [f"head:{head.path}" for head in heads]
    names = ["off", *options.drafters]
    engines = {name: LLM(options.model, speculate=name, draft_tokens=options.draft_tokens, **engine) for name in names}
    for llm in engines.values():  # threads, memory and pages are there before the clock starts
        llm.generate(list(range(20, 40)), SamplingParams(temperature=0.0, max_tokens=options.warm, ignore_eos=True))
    rows = []
    for batch in options.batch:
        for kind, texts in sets.items():
            runs = _measure(engines, texts, batch, options)
            rows += [_row(kind, batch, name, runs["off"], runs[name]) for name in options.drafters]
            if not options.json:
                for row in rows[-len(options.drafters) :]:
                    print(_line(row), flush=True)
    if options.json:
        trained = [asdict(head) | {"path": str(head.path)} for head in heads]
        print(json.dumps({"model": options.model, "rows": [asdict(row) for row in rows], "heads": trained}))


def _train(options: argparse.Namespace) -> list[TrainedHead]:
    """Heads of the kinds asked for, from one reading of the model's answers."""
    prompts = [prompt for path in options.train for prompt in read_prompts(path)]
    began = time.perf_counter()
    with LLM(options.model, threads=options.threads, device=options.device, prefix_caching=False, context=1024) as llm:
        states = own_answers(llm, prompts, options.train_tokens, options.answer)
        _say(f"{len(states.token_ids)} tokens generated and read in {time.perf_counter() - began:.1f} s")
        heads = []
        for kind in options.heads:
            plan = TrainingPlan(kind, options.depth, options.width, options.steps, options.positions)
            heads.append(train_head(llm, states, plan, options.out / kind, _say))
            accepted = ", ".join(f"{each:.3f}" for each in heads[-1].acceptance)
            _say(f"{kind}: {heads[-1].seconds:.1f} s, accepted on held-out answers by depth: {accepted}")
    return heads


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _measure(
    engines: dict[str, LLM], texts: list[str], batch: int, options: argparse.Namespace
) -> dict[str, list[_Run]]:
    """Chunks of `batch` prompts, each by every engine in turn; the order is reversed from chunk to chunk."""
    runs: dict[str, list[_Run]] = {name: [] for name in engines}
    params = SamplingParams(temperature=options.temperature, seed=1, max_tokens=options.max_tokens, ignore_eos=True)
    chunks = [texts[begin : begin + batch] for begin in range(0, len(texts) - batch + 1, batch)] * options.repeat
    for number, chunk in enumerate(chunks):
        for name in list(engines)[:: 1 if number % 2 == 0 else -1]:
            runs[name].append(_run(engines[name], chunk, params))
    return runs


def _run(llm: LLM, texts: list[str], params: SamplingParams) -> _Run:
    scheduler = llm.parts.core.scheduler
    before = (llm.stats.num_steps, scheduler.num_drafted, scheduler.num_accepted, scheduler.saved_seconds)
    conversations = [[{"role": "user", "content": text}] for text in texts]
    outputs = llm.chat(conversations, params) if llm.parts.chat_template is not None else llm.generate(texts, params)
    after = (llm.stats.num_steps, scheduler.num_drafted, scheduler.num_accepted, scheduler.saved_seconds)
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
    return Row(
        prompts=kind,
        batch=batch,
        drafter=name,
        ratio=without / with_drafts,
        tok_s_without=num_tokens / without,
        tok_s_with=num_tokens / with_drafts,
        acceptance=accepted / max(1, proposed),
        tokens_per_step=num_tokens / max(1, num_tokens - accepted),
        step_ms_without=1e3 * without / sum(run.steps for run in plain),
        step_ms_with=1e3 * with_drafts / sum(run.steps for run in drafted),
        gain_by_engine=(with_drafts + saved) / with_drafts,
        same=sum(pairs) / len(pairs),
    )


def _prompt_sets(options: argparse.Namespace) -> dict[str, list[str]]:
    most = max(options.count, max(options.batch))
    with options.prompts.open() as lines:
        questions: list[dict[str, Any]] = [json.loads(line) for line in lines]
    sets = {
        "summarization": [each["turns"][0] for each in questions if each["category"] == "summarization"],
        "open-ended": [each["turns"][0] for each in questions if each["category"] in _OPEN],
    }
    if options.code:
        with options.code.open() as lines:
            sets["code editing"] = [_edit(json.loads(line)) for line in lines]
    return {kind: texts[:most] for kind, texts in sets.items()}


def _edit(problem: dict[str, Any]) -> str:
    name = problem["entry_point"]
    code = (problem["prompt"] + problem["canonical_solution"]).strip()
    return f"Rename the function `{name}` to `solve` and repeat the whole file:\n\n```python\n{code}\n```"


def _line(row: Row) -> str:
    return (
        f"{row.prompts:14} batch {row.batch:<3} {row.drafter[-22:]:22} {row.ratio:5.2f}x  "
        f"{row.tok_s_without:7.1f} -> {row.tok_s_with:7.1f} tok/s  accepted {row.acceptance:4.0%}  "
        f"{row.tokens_per_step:.2f} tokens a step of {row.step_ms_with:.2f} ms (without {row.step_ms_without:.2f})  "
        f"own estimate {row.gain_by_engine:.2f}x  same {row.same:4.0%}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench rows, JSON lines")
    parser.add_argument("--code", type=Path, help="HumanEval rows, JSON lines")
    parser.add_argument("--drafters", type=lambda text: text.split(","), default=None)
    parser.add_argument("--batch", type=lambda text: [int(each) for each in text.split(",")], default=[1, 16])
    parser.add_argument("--count", type=int, default=8, help="prompts of each kind; at least a whole batch")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--draft-tokens", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--warm", type=int, default=8, help="tokens before the clock starts; on a GPU 100, for graphs")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--train", type=lambda text: [Path(each) for each in text.split(",")], help="prompts, JSON lines"
    )
    parser.add_argument("--train-tokens", type=int, default=400_000, help="of answers to learn from, at most")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer to learn from, at most")
    parser.add_argument("--heads", type=lambda text: text.split(","), default=["eagle"])
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--width", type=int, default=0, help="inner width of an eagle head; 0: twice the hidden size")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--positions", type=int, default=1024, help="of a training step")
    parser.add_argument("--out", type=Path, default=Path("draft_heads"), help="where heads are written")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.drafters is None:
        options.drafters = [] if options.train else ["ngram", "suffix"]
    return options


if __name__ == "__main__":
    main()
