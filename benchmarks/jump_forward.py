"""Structured output with drafts from the grammar against without, on real schemas: steps, throughput, same output.

    python benchmarks/jump_forward.py smollm2 schemastore.jsonl.gz json_schema_test_suite.jsonl.gz
                                      [--count 60] [--answers 3] [--batch 1] [--temperature 0,0.7] [--max-tokens 96]
                                      [--speculate off] [--json]

Each line of a file has a `schema`; of those that the engine takes, `count` are used, from all over it. A model is asked
for a document of each schema, several times with other words and seeds. All first answers come before all second ones,
each without and with drafts back to back, in alternating order on one engine; grammars are compiled before, and the
prompt is in the prefix cache for both, because one that is computed whole may be rounded otherwise. Prints a table in
markdown: `steps` are all of the engine, that of the prompt included; `first` counts answers to schemas that were not
seen before, `later` the others; `same` is whether every output has the same tokens with and without.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tokenmill import LLM, SamplingParams, UserError
from tokenmill.runtime.speculation.base import Target
from tokenmill.runtime.speculation.speculator import Speculator, build_speculator
from tokenmill.types import StructuredSpec

_GOLDEN = 0.6180339887  # multiples of it, modulo 1, are spread evenly
_ASKED = ("Write a small example.", "Write an example of a real project.", "Write a different, complete example.")


@dataclass
class Row:
    file: str
    answers: str  # "first", "later" or "all"
    batch: int
    temperature: float
    requests: int
    tokens: int
    steps: tuple[int, int]  # without and with drafts
    rates: tuple[float, float]  # tokens per second
    acceptance: float
    different: int  # outputs

    @property
    def saved(self) -> float:
        return 1.0 - self.steps[1] / max(1, self.steps[0])


@dataclass
class _Run:
    seconds: float
    steps: int
    drafted: int
    accepted: int
    tokens: list[list[int]]


Pair = tuple[_Run, _Run]  # without and with drafts


def main() -> None:
    options = _arguments()
    rows: list[Row] = []
    every: dict[tuple[int, float], list[Pair]] = {}
    _print(_HEAD, options)
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
            for batch, temperature in product(options.batch, options.temperature):
                target = Target(runtime.model, runtime.store, runtime.executor, llm.parts.config)
                speculator = build_speculator(target)  # has learned nothing yet
                assert speculator is not None
                found = _measure(llm, speculator, schemas, batch, temperature, options)
                found["all"] = [pair for pairs in found.values() for pair in pairs]
                every.setdefault((batch, temperature), []).extend(found["all"])
                for name, pairs in found.items():
                    rows.append(_row(path.name, name, batch, temperature, pairs))
                    _print(_line(rows[-1]), options)
    for (batch, temperature), pairs in every.items():
        rows.append(_row("all files", "all", batch, temperature, pairs))
        _print(_line(rows[-1]), options)
    if options.json:
        print(json.dumps({"model": options.model, "rows": [asdict(row) | {"saved": row.saved} for row in rows]}))


def _print(text: str, options: argparse.Namespace) -> None:
    if not options.json:
        print(text, flush=True)


def _usable(llm: LLM, path: Path, count: int) -> list[tuple[str, StructuredSpec]]:
    """(prompt, grammar) of schemas that compile, from all over the file and always the same."""
    found: list[tuple[str, StructuredSpec]] = []
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    lines = data.decode().splitlines()
    for number in sorted(range(len(lines)), key=lambda number: number * _GOLDEN % 1):
        spec = StructuredSpec("json_schema", json.dumps(json.loads(lines[number])["schema"]))
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
) -> dict[str, list[Pair]]:
    """(without, with) of each batch."""
    pairs: dict[str, list[Pair]] = {}
    for answer in range(options.answers):
        work = list(_requests(llm, schemas, answer, temperature, options.max_tokens))
        for begin in range(0, len(work), batch):
            group = work[begin : begin + batch]
            llm.generate([ids for ids, _ in group], SamplingParams(temperature=0.0, max_tokens=1))
            for _, params in group:
                assert params.structured is not None
                llm.parts.grammars.compile(params.structured)
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


def _row(file: str, answers: str, batch: int, temperature: float, pairs: list[Pair]) -> Row:
    sides = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    outputs = [(a, b) for one, other in pairs for a, b in zip(one.tokens, other.tokens, strict=True)]
    steps, rates = [], []
    for runs in sides:
        steps.append(sum(run.steps for run in runs))
        rates.append(sum(len(each) for run in runs for each in run.tokens) / sum(run.seconds for run in runs))
    return Row(
        file,
        answers,
        batch,
        temperature,
        len(outputs),
        sum(len(a) for a, _ in outputs),
        (steps[0], steps[1]),
        (rates[0], rates[1]),
        sum(run.accepted for run in sides[1]) / max(1, sum(run.drafted for run in sides[1])),
        sum(a != b for a, b in outputs),
    )


_HEAD = """\
| Schemas | Answers | Batch | T | Requests | Tokens | Steps without | with | fewer | Tokens/s without | with | ratio | Drafts held | Same output |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""  # noqa: E501


def _line(row: Row) -> str:
    without, using = row.rates
    cells = [
        *(row.file, row.answers, row.batch, row.temperature, row.requests, f"{row.tokens:,}"),
        *(f"{row.steps[0]:,}", f"{row.steps[1]:,}", f"{row.saved:.1%}"),
        *(f"{without:.1f}", f"{using:.1f}", f"{using / without:.2f}", f"{row.acceptance:.0%}"),
        "yes" if not row.different else f"no: {row.different} of {row.requests} differ",
    ]
    return f"| {' | '.join(map(str, cells))} |"


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
