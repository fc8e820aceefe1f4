"""Real schemas on a real model: what compiles, what ends, what is valid; with free requests beside in the same batch.

`python -m tests.e2e.structured_suite tests/data/json/*.jsonl.gz` runs every schema of the given files (a line of JSON
with a `schema` each) and prints one JSON object; test_structured.py runs a few of them. Whatever ends by itself must
validate, whatever is cut off must be the beginning of something valid, and what cannot be kept must be refused with the
reason.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
from llguidance import LLMatcher, LLTokenizer

from tokenmill import LLM, SamplingParams, UserError
from tokenmill.grammar.source import grammar_text
from tokenmill.types import StructuredSpec

_PROMPT = "Write a very small JSON example.\n"
_FREE = "The weather today is"
_STRICT_AT_ONCE = 6  # with two free ones: a batch of eight


@dataclass
class Tally:
    schemas: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    ended: int = 0
    cut: int = 0
    failed: int = 0  # ended by a limit of the grammar library
    unchecked: int = 0
    problems: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        refused = sum(self.refused.values())
        return {
            "schemas": self.schemas,
            "compiled": self.schemas - refused,
            "refused": refused,
            "refusals": dict(self.refused.most_common()),
            "ended": self.ended,
            "ended_unchecked": self.unchecked,
            "cut_and_valid_prefix": self.cut,
            "ended_by_limit": self.failed,
            "not_valid": self.problems,
        }


def load_schemas(path: Path) -> list[Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line)["schema"] for line in file]


def run(llm: LLM, schemas: Sequence[Any], max_tokens: int) -> Tally:
    tally = Tally(len(schemas))
    kept = []
    for schema in schemas:
        spec = StructuredSpec("json_schema", json.dumps(schema))
        try:
            llm.parts.grammars.compile(spec)
        except UserError as error:
            tally.refused[error.problem.removeprefix("the json_schema cannot be used: ")[:60]] += 1
        else:
            kept.append((schema, spec))
    free = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for begin in range(0, len(kept), _STRICT_AT_ONCE):
        group = kept[begin : begin + _STRICT_AT_ONCE]
        strict = [
            SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=begin + place, structured=spec)
            for place, (_, spec) in enumerate(group)
        ]
        outputs = llm.generate([_FREE, _FREE, *([_PROMPT] * len(group))], [free, free, *strict])
        for (schema, spec), output in zip(group, outputs[2:], strict=True):
            _check(schema, spec, output.outputs[0].text, output.outputs[0].finish_reason, tally)
    return tally


def _check(schema: Any, spec: StructuredSpec, text: str, reason: str | None, tally: Tally) -> None:
    if reason == "stop":
        tally.ended += 1
        try:
            jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema).validate(
                json.loads(text)
            )
        except re.error:
            tally.unchecked += 1  # a pattern that the validator cannot read
        except Exception as error:
            tally.problems.append(f"{json.dumps(schema)[:100]}: {text[:100]!r}: {str(error)[:100]}")
    else:
        tally.cut += reason == "length"
        tally.failed += reason == "error"
        data = list(text.encode())
        whole = data if not text.endswith("\ufffd") else list(text.rstrip("\ufffd").encode())  # cut within a character
        matcher = LLMatcher(LLTokenizer("byte"), grammar_text(spec), log_level=0)
        if matcher.try_consume_tokens(whole) != len(whole):
            tally.problems.append(f"{json.dumps(schema)[:100]}: not a prefix: {text[:100]!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=120)
    arguments = parser.parse_args()
    with LLM(arguments.model, concurrency=8, context=512) as llm:
        results = {path.name: run(llm, load_schemas(path), arguments.max_tokens).record() for path in arguments.files}
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
