"""Distance of each path to exact float32 log-probabilities, beside llama.cpp's, on the golden files.

    python benchmarks/golden_distance.py smollm2 gemma3-270m [--shared ../shared]

Batches of 4 tokens use the kernels for few rows, batches of 512 those for many.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.parity.test_golden import _distances
from tokenmill import LLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="+")
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    arguments = parser.parse_args()
    for model in arguments.model:
        golden = json.loads((arguments.shared / "golden" / f"{model}.json").read_text())
        print(f"{model}: llama.cpp {golden['meta']['llama_cpp_distance_to_float32']}")
        for batch_tokens in (4, 512):
            with LLM(model, context=1024, concurrency=min(batch_tokens, 16), batch_tokens=batch_tokens) as llm:
                distances, flips, _ = _distances(llm, golden["generations"])
            median, p95 = float(distances.median()), float(distances.quantile(0.95))
            print(f"  batches of {batch_tokens}: median {median:.4f} p95 {p95:.4f} flips {flips}", flush=True)


if __name__ == "__main__":
    main()
