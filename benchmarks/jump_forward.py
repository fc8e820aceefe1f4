"""Structured output with drafts from the grammar against without, on real schemas: steps, throughput, same output.

    python benchmarks/jump_forward.py smollm2 schemastore.jsonl.gz json_schema_test_suite.jsonl.gz
                                      [--count 60] [--answers 3] [--batch 1] [--temperature 0,0.7] [--max-tokens 96]
                                      [--speculate off] [--json]

Each line of a file has a `schema`; those that the engine refuses are left out. A model is asked for a document of each
schema, several times with other words and seeds. All first answers come before all second ones, each without and with
drafts back to back, in alternating order on one engine; the prompt is in the prefix cache for both, because one that is
computed whole may be rounded otherwise. `steps` is the share of decoding steps of a sequence that drafts save:
1 - (tokens - accepted drafts) / tokens. `first` counts answers to schemas that were not seen before,
`later` the others. `speed` is tokens per second with drafts over without. `same` is the share of outputs with the same
tokens.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tokenmill import LLM, SamplingParams, UserError
from tokenmill.runtime.speculation.base import Target
from tokenmill.runtime.speculation.speculator import Speculator, build_speculator
from tokenmill.types import StructuredSpec

_ASKED = ("Write a small example.", "Write an example of a real project.", "Write a different, complete example.")


@dataclass
class Row:
    file: str
    answers: str  # "first" or "later"
    batch: int
    temperature: float
    requests: int
    tokens: int
    steps: float  # saved, as a share
    engine_steps: float  # saved, of the whole batch
    speed: float
    acceptance: float
    same: float


@dataclass
class _Run:
    seconds: float
    steps: int
    drafted: int
    accepted: int
    tokens: list[list[int]]


def main() -> None:
    options = _arguments()
    rows = []
    with LLM(
        options.model,
        concurrency=max(options.batch),
        context=2048,
        speculate=options.speculate,
        device=options.device,
        threads=options.threads or None,
    ) as llm:
        runtime = llm.parts.runtime
        for path in options.files:
            schemas = _usable(llm, path, options.count)
            for batch in options.batch:
                for temperature in options.temperature:
                    target = Target(runtime.model, runtime.store, runtime.executor, llm.parts.config)
                    speculator = build_speculator(target)  # has learned nothing yet
                    assert speculator is not None
                    found = _measure(llm, speculator, schemas, batch, temperature, options)
                    rows += [_row(path.name, name, batch, temperature, pairs) for name, pairs in found.items()]
                    if not options.json:
                        for row in rows[-len(found) :]:
                            print(_line(row), flush=True)
    if options.json:
        print(json.dumps({"model": options.model, "rows": [asdict(row) for row in rows]}))


def _usable(llm: LLM, path: Path, count: int) -> list[tuple[str, StructuredSpec]]:
    """(prompt, grammar) of the first schemas that compile."""
    found: list[tuple[str, StructuredSpec]] = []
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for line in data.decode().splitlines():
        spec = StructuredSpec("json_schema", json.dumps(json.loads(line)["schema"]))
        try:
            llm.parts.grammars.compile(spec)
        except UserError:
            continue
        found.append((f"A JSON document follows this schema:\n{spec.text[:1200]}\n", spec))
        if len(found) == count:
            break
    return found


def _measure(
    llm: LLM,
    speculator: Speculator,
    schemas: Sequence[tuple[str, StructuredSpec]],
    batch: int,
    temperature: float,
    options: argparse.Namespace,
) -> dict[str, list[tuple[_Run, _Run]]]:
    """(without, with) of each batch."""
    pairs: dict[str, list[tuple[_Run, _Run]]] = {}
    for answer in range(options.answers):
        work = list(_requests(llm, schemas, answer, temperature, options.max_tokens))
        for begin in range(0, len(work), batch):
            group = work[begin : begin + batch]
            llm.generate([ids for ids, _ in group], SamplingParams(temperature=0.0, max_tokens=1))
            order = [None, speculator] if begin // batch % 2 else [speculator, None]
            runs = {each is not None: _run(llm, each, group) for each in order}
            pairs.setdefault("later" if answer else "first", []).append((runs[False], runs[True]))
    return pairs


def _requests(
    llm: LLM, schemas: Sequence[tuple[str, StructuredSpec]], answer: int, temperature: float, max_tokens: int
) -> Iterator[tuple[list[int], SamplingParams]]:
    for number, (text, spec) in enumerate(schemas):
        messages = [{"role": "user", "content": text + _ASKED[answer % len(_ASKED)]}]
        template = llm.parts.chat_template
        prompt = template.render(messages) if template is not None else messages[0]["content"]
        ids = llm.parts.tokenizer.encode(prompt, add_special_tokens=template is None, parse_special=True)
        seed = 1000 * answer + number
        yield ids, SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, structured=spec)


def _run(llm: LLM, speculator: Speculator | None, group: list[tuple[list[int], SamplingParams]]) -> _Run:
    llm.parts.runtime.runner.speculator = speculator
    stats = llm.stats
    steps, drafted, accepted = stats.num_steps, stats.num_drafted, stats.num_accepted
    began = time.perf_counter()
    outputs = llm.generate([ids for ids, _ in group], [params for _, params in group])
    seconds = time.perf_counter() - began
    stats = llm.stats
    tokens = [each.token_ids for output in outputs for each in output.outputs]
    return _Run(seconds, stats.num_steps - steps, stats.num_drafted - drafted, stats.num_accepted - accepted, tokens)


def _row(file: str, answers: str, batch: int, temperature: float, pairs: list[tuple[_Run, _Run]]) -> Row:
    plain, drafting = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    outputs = [(a, b) for one, other in pairs for a, b in zip(one.tokens, other.tokens, strict=True)]
    tokens = sum(len(each) for run in plain for each in run.tokens)
    drafted_tokens = sum(len(each) for run in drafting for each in run.tokens)
    accepted = sum(run.accepted for run in drafting)
    speeds = [total / sum(run.seconds for run in runs) for total, runs in ((tokens, plain), (drafted_tokens, drafting))]
    return Row(
        file,
        answers,
        batch,
        temperature,
        len(outputs),
        tokens,
        accepted / max(1, drafted_tokens),
        1.0 - sum(run.steps for run in drafting) / max(1, sum(run.steps for run in plain)),
        speeds[1] / speeds[0],
        accepted / max(1, sum(run.drafted for run in drafting)),
        sum(a == b for a, b in outputs) / max(1, len(outputs)),
    )


def _line(row: Row) -> str:
    return (
        f"{row.file:40} {row.answers:6} batch {row.batch:3} T {row.temperature:3.1f}  {row.requests:4} requests "
        f"{row.tokens:6} tokens  steps saved {row.steps:6.1%} (engine {row.engine_steps:6.1%})  "
        f"speed x{row.speed:.2f}  accepted {row.acceptance:.0%}  same {row.same:.1%}"
    )


def _numbers(kind: type) -> Any:
    return lambda text: [kind(each) for each in text.split(",")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=60, help="schemas of each file")
    parser.add_argument("--answers", type=int, default=3, help="for each schema")
    parser.add_argument("--batch", type=_numbers(int), default=[1])
    parser.add_argument("--temperature", type=_numbers(float), default=[0.0, 0.7])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--speculate", default="off")
    parser.add_argument("--device", default=None)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
