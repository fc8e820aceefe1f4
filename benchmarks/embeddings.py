"""Embeddings against sentence-transformers on the same model, the same texts and the same threads, in the same run.

    python benchmarks/embeddings.py [MODEL] [--texts 384] [--calls 32,384] [--repeat 5] [--threads N] [--text FILE]

Texts are the sentences and headings of a text file, in random order: short, and of mixed length. `--calls`: how many of
them each call of `embed` (`encode`) gets, as an application or a server has them; 384 of 384 is one call, in which
sentence-transformers sorts all texts by length before it pads batches of 32. Both sides take turns; medians over
the rounds. Prints the largest difference of a number in the vectors, too.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from tokenmill import Embedder
from tokenmill.checkpoint.sources import resolve

_TEXT = Path(__file__).parents[1] / "tests/data/text/wikitext2-raw.test.txt"
_WORDS = (2, 60)  # of a text


def main() -> None:
    options = _arguments()
    from sentence_transformers import SentenceTransformer

    texts = short_texts(options.text, options.texts)
    with Embedder(options.model, **({"threads": options.threads} if options.threads else {})) as ours:
        theirs = SentenceTransformer(str(resolve(options.model).path), device=ours.parts.config.device)
        sides: dict[str, Callable[[list[str]], np.ndarray]] = {
            "tokenmill": ours.embed,
            "sentence_transformers": lambda batch: theirs.encode(batch, show_progress_bar=False),
        }
        lengths = [len(ids) for ids in ours.parts.tokenizer.encode_batch(texts)]
        difference = float(np.abs(ours.embed(texts) - theirs.encode(texts)).max())
        for size in map(int, options.calls.split(",")):
            calls = [texts[begin : begin + size] for begin in range(0, len(texts), size)]
            seconds = _measure(sides, calls, options.repeat)
            rates = {name: len(texts) / each for name, each in seconds.items()}
            row = {
                "texts_per_call": size,
                "texts": len(texts),
                "tokens": {"mean": round(statistics.mean(lengths), 1), "max": max(lengths)},
                "threads": torch.get_num_threads(),
                "texts_s": {name: round(rate, 1) for name, rate in rates.items()},
                "ratio": round(rates["tokenmill"] / rates["sentence_transformers"], 3),
                "max_difference": difference,
            }
            print(json.dumps(row), flush=True)


def _measure(
    sides: dict[str, Callable[[list[str]], np.ndarray]], calls: list[list[str]], repeat: int
) -> dict[str, float]:
    """Median seconds for all calls, by side; they take turns, in changing order."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for embed in sides.values():
        embed(calls[0])
    for turn in range(repeat):
        for name in sorted(sides, reverse=bool(turn % 2)):
            began = time.perf_counter()
            for call in calls:
                sides[name](call)
            found[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) for name, each in found.items()}


def short_texts(file: Path, number: int) -> list[str]:
    sentences = re.split(r"(?<= [.!?]) |\n", file.read_text(encoding="utf-8"))
    texts = [text.strip(" =\n") for text in sentences]
    texts = [text for text in texts if _WORDS[0] <= len(text.split()) <= _WORDS[1]]
    random.Random(0).shuffle(texts)
    return (texts * (1 + number // max(1, len(texts))))[:number]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="minilm")
    parser.add_argument("--texts", type=int, default=384)
    parser.add_argument("--calls", default="32,384", help="texts of a call, several by commas")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--text", type=Path, default=_TEXT)
    return parser.parse_args()


if __name__ == "__main__":
    main()
