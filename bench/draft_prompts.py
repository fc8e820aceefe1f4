"""Prompts to train draft heads on, made from task files and a text: JSON lines {"prompt"} on stdout.

    python bench/draft_prompts.py DATA --text TEXT [--count 4000] > prompts.jsonl

DATA has any of ARC, MMLU, TruthfulQA, PIQA and IFEval rows (*.jsonl, by name); TEXT is plain or gzipped, a
paragraph per line. Questions are asked as they are; paragraphs are to be summarized, continued or explained.
None of Spec-Bench's own sources is among them, so that what is trained here may be measured there.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ASKED = (
    "Summarize: {}",
    "Summarize the following text in two sentences.\n\n{}",
    "Explain to a child what this is about: {}",
    "Write a short story that begins like this: {}",
    "List the main points of the following text.\n\n{}",
    "Write a blog post about the following.\n\n{}",
)
_SOURCES = ("arc", "mmlu", "truthfulqa", "piqa", "ifeval")
_QUESTION_FIELDS = ("prompt", "question", "q", "query", "goal")
_LONGEST = 1500  # characters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    questions = list(_questions(options.data))
    passages = [draw.choice(_ASKED).format(each) for each in _paragraphs(options.text)]
    draw.shuffle(questions)
    draw.shuffle(passages)
    half = min(len(questions), options.count // 2)
    chosen = questions[:half] + passages[: options.count - half]
    draw.shuffle(chosen)
    for prompt in chosen:
        print(json.dumps({"prompt": prompt}))
    print(f"{half} questions, {len(chosen) - half} passages", file=sys.stderr)


def _questions(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.jsonl")):
        if path.name.startswith(_SOURCES):
            with path.open() as lines:
                for line in lines:
                    row: dict[str, Any] = json.loads(line)
                    text = next((row[name] for name in _QUESTION_FIELDS if isinstance(row.get(name), str)), "")
                    text = text.removeprefix("Question:").removesuffix("Answer:").strip()
                    if 10 < len(text) < _LONGEST:
                        yield text


def _paragraphs(path: Path) -> Iterator[str]:
    octets = path.read_bytes()
    content = (gzip.decompress(octets) if path.suffix == ".gz" else octets).decode()
    for line in content.splitlines():
        text = line.strip().replace(" @-@ ", "-").replace(" ,", ",").replace(" .", ".")
        if 200 < len(text) < _LONGEST and not text.startswith("="):
            yield text


if __name__ == "__main__":
    main()
