"""Distance of each path to exact float32 log-probabilities, beside llama.cpp's, on the golden files.

    python benchmarks/golden_distance.py smollm2 gemma3-270m [--shared ../shared]
    python benchmarks/golden_distance.py smollm2 --device cuda --dtypes bfloat16,float16

Batches of 4 tokens use the kernels for few rows, batches of 512 those for many. On a GPU: for each dtype that it
computes in, with pages of the same type; one that the model does not run in is named with the reason.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.parity.test_golden import _distances
from tokenmill import LLM
from tokenmill.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="+")
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtypes", default="auto", help="of --device cuda, separated by commas")
    arguments = parser.parse_args()
    dtypes = arguments.dtypes.split(",")
    if arguments.device == "cpu" and dtypes != ["auto"]:
        parser.error("--dtypes is for --device cuda: a CPU computes in float32")
    for model in arguments.model:
        golden = json.loads((arguments.shared / "golden" / f"{model}.json").read_text())
        print(f"{model}: llama.cpp {golden['meta']['llama_cpp_distance_to_float32']}")
        for dtype, batch_tokens in itertools.product(dtypes, (4, 512)):
            kind = "" if dtype == "auto" else f"{dtype}, "
            try:
                distances, flips = _measure(model, golden["generations"], batch_tokens, arguments.device, dtype)
            except UserError as error:
                print(f"  {kind}batches of {batch_tokens}: {error}", flush=True)
                continue
            median, p95 = float(distances.median()), float(distances.quantile(0.95))
            print(f"  {kind}batches of {batch_tokens}: median {median:.4f} p95 {p95:.4f} flips {flips}", flush=True)


def _measure(
    model: str, generations: list[dict[str, Any]], batch_tokens: int, device: str, dtype: str
) -> tuple[Tensor, int]:
    options: dict[str, Any] = {"concurrency": min(batch_tokens, 16), "batch_tokens": batch_tokens}
    with LLM(model, context=1024, device=device, dtype=dtype, **options) as llm:
        distances, flips, _ = _distances(llm, generations)
    return distances, flips


if __name__ == "__main__":
    main()
