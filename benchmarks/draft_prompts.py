"""Prompts to train draft heads on, made from task files, a text and Python code: JSON lines {"prompt"} on stdout.

    python benchmarks/draft_prompts.py DATA --text TEXT [--code DIR] [--count 12000] > prompts.jsonl

DATA has any of ARC, MMLU, TruthfulQA, PIQA and IFEval rows (*.jsonl, by name); TEXT is plain or gzipped, a
paragraph per line; DIR has Python files (default: the standard library). Questions are asked as they are; paragraphs
are to be summarized, continued or explained, in several ways where there are too few; functions are to be explained,
rewritten or repeated. None of Spec-Bench's and HumanEval's own rows is among them, so that what is trained here may be
measured there.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_TEXT_TASKS = (
    "Summarize: {}",
    "Summarize the following text in two sentences.\n\n{}",
    "Explain to a child what this is about: {}",
    "Write a short story that begins like this: {}",
    "List the main points of the following text.\n\n{}",
    "Write a blog post about the following.\n\n{}",
    "What questions does this text answer?\n\n{}",
    "Rewrite the following in simpler words.\n\n{}",
)
_CODE_TASKS = (
    "Explain what this function does.\n\n```python\n{}\n```",
    "Add comments to this code and write it out again.\n\n```python\n{}\n```",
    "Improve the names of the variables and give me the full code.\n\n```python\n{}\n```",
    "Write a test for the following code.\n\n```python\n{}\n```",
    "Fix any mistakes in this code and repeat it.\n\n{}",
)
_SOURCES = ("arc", "mmlu", "truthfulqa", "piqa", "ifeval")
_QUESTION_FIELDS = ("prompt", "question", "q", "query", "goal")
_LONGEST = 1500  # characters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--code", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--count", type=int, default=12000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    questions = list(_questions(options.data))
    draw.shuffle(questions)
    questions = questions[: options.count // 2]
    code = _ask(list(_functions(options.code)), _CODE_TASKS, options.count // 8, draw)
    rest = options.count - len(questions) - len(code)
    chosen = questions + code + _ask(list(_paragraphs(options.text)), _TEXT_TASKS, rest, draw)
    draw.shuffle(chosen)
    for prompt in chosen:
        print(json.dumps({"prompt": prompt}))
    print(f"{len(chosen)} prompts: {len(questions)} questions, {len(code)} of code", file=sys.stderr)


def _ask(subjects: list[str], tasks: Sequence[str], count: int, draw: random.Random) -> list[str]:
    """`count` prompts, no two alike: every subject once, then again with another task."""
    draw.shuffle(subjects)
    begins = [draw.randrange(len(tasks)) for _ in subjects]
    prompts = [
        tasks[(begin + offset) % len(tasks)].format(subject)
        for offset in range(len(tasks))
        for begin, subject in zip(begins, subjects, strict=True)
    ]
    return prompts[:count]


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


def _functions(folder: Path) -> Iterator[str]:
    """Functions of some length at the top of modules."""
    for path in sorted(folder.glob("*.py")):
        source = path.read_text(errors="replace")
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef):
                text = ast.get_source_segment(source, node) or ""
                if 150 < len(text) < _LONGEST:
                    yield text


if __name__ == "__main__":
    main()
