"""The vocabulary of a GGUF file in C++ and by the `tokenizers` library: memory, time to build, time to encode.

    python benchmarks/vocabulary.py [MODEL] [--text README.md] [--repeats 5]

Each is built in a process of its own, in turns; medians. Memory is what the process holds more of afterwards (anonymous
pages), seconds are those of the core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tokenmill.checkpoint import gguf_tokenizer
from tokenmill.checkpoint.gguf_header import read_gguf_metadata
from tokenmill.checkpoint.sources import resolve
from tokenmill.kernels import native

_ENCODINGS = 20


def _anonymous_mb() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("Anonymous:"))


def measure(name: str, model: str, text: str) -> dict[str, float]:
    if name != "C++":
        native._missing = "measured without"
    path, before, began = resolve(model).path, _anonymous_mb(), time.process_time()
    tokenizer = gguf_tokenizer.build_tokenizer(read_gguf_metadata(path))
    built, held = time.process_time(), _anonymous_mb()
    tokenizer.encode(text)
    began_encoding = time.process_time()
    for _ in range(_ENCODINGS):
        ids = tokenizer.encode(text)
    seconds = (time.process_time() - began_encoding) / _ENCODINGS
    return {"mb": held - before, "seconds": built - began, "us_per_token": 1e6 * seconds / len(ids)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "README.md")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only, options.model, options.text.read_text())))
        return
    rows: dict[str, list[dict[str, float]]] = {"C++": [], "tokenizers": []}
    for _ in range(options.repeats):
        for name, found in rows.items():
            command = [sys.executable, __file__, options.model, "--text", str(options.text), "--only", name]
            found.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    for name, found in rows.items():
        mb, seconds, each = (statistics.median(row[key] for row in found) for key in ("mb", "seconds", "us_per_token"))
        print(f"{name:11} {mb:5.1f} MB, built in {seconds:.3f} s, {each:.2f} us a token")


if __name__ == "__main__":
    main()
