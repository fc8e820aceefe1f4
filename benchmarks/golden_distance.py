"""Distance of each path to exact float32 log-probabilities, beside llama.cpp's, on the golden files.

    python benchmarks/golden_distance.py smollm2 gemma3-270m [--shared ../shared]
    python benchmarks/golden_distance.py smollm2 --file smollm2-Q4_0.gguf [--peer-python PYTHON]
    python benchmarks/golden_distance.py smollm2 --device cuda --dtypes bfloat16,float16

Batches of 4 tokens use the kernels for few rows, batches of 512 those for many. On a GPU: for each dtype that it
computes in, with pages of the same type; one that the model does not run in is named with the reason. With `--file`,
another file of the model: the sequences are those of the golden file, exact is our reference path in float32 on this
file, and llama.cpp runs beside it (llama-cpp-python, in the interpreter that is named).
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor, tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.parity.test_golden import _distances
from tokenmill import LLM, SamplingParams
from tokenmill.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="+")
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    parser.add_argument("--file", type=Path, help="GGUF file of the one model, beside llama.cpp")
    parser.add_argument("--peer-python", default=sys.executable, help="that imports llama_cpp")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtypes", default="auto", help="of --device cuda, separated by commas")
    arguments = parser.parse_args()
    dtypes = arguments.dtypes.split(",")
    if arguments.device == "cpu" and dtypes != ["auto"]:
        parser.error("--dtypes is for --device cuda: a CPU computes in float32")
    if arguments.file is not None and (len(arguments.model) > 1 or arguments.device != "cpu"):
        parser.error("--file is for one model on a CPU")
    for model in arguments.model:
        golden = json.loads((arguments.shared / "golden" / f"{model}.json").read_text())
        source = model if arguments.file is None else str(arguments.file)
        if arguments.file is None:
            print(f"{model}: llama.cpp {golden['meta']['llama_cpp_distance_to_float32']}")
        else:
            set_exact(arguments.file, golden["generations"])
            for batch_tokens in (4, 512):
                found = peer_distances(arguments.peer_python, arguments.file, golden["generations"], batch_tokens)
                print(f"llama.cpp, batches of {batch_tokens}: {summary(found)}", flush=True)
        for dtype, batch_tokens in itertools.product(dtypes, (4, 512)):
            kind = "" if dtype == "auto" else f"{dtype}, "
            try:
                distances, flips = _measure(source, golden["generations"], batch_tokens, arguments.device, dtype)
            except UserError as error:
                print(f"  {kind}batches of {batch_tokens}: {error}", flush=True)
                continue
            print(f"  {kind}batches of {batch_tokens}: {summary(distances)} flips {flips}", flush=True)


def summary(distances: Tensor) -> str:
    return f"median {float(distances.median()):.4f} p95 {float(distances.quantile(0.95)):.4f}"


def sequences_of(generations: list[dict[str, Any]]) -> list[list[int]]:
    return [each["prompt_ids"] + each["greedy_ids"] for each in generations]


def set_exact(path: Path, generations: list[dict[str, Any]]) -> None:
    """Replace the golden log-probabilities by those of this file, in float32."""
    options: dict[str, Any] = {"kernels": "ref", "executor": "eager", "kv_cache_dtype": "float32", "batch_tokens": 1024}
    with LLM(path, context=1024, concurrency=16, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=5)
        outputs = llm.generate(sequences_of(generations), params)
    for each, output in zip(generations, outputs, strict=True):
        assert output.prompt_logprobs is not None
        exact = []
        for rows in output.prompt_logprobs[len(each["prompt_ids"]) :]:
            assert rows is not None
            found = sorted(rows, key=lambda token_id: -rows[token_id].logprob)
            exact.append([(token_id, rows[token_id].logprob) for token_id in found])
        each["float32_top5_logprobs"] = exact


def peer_distances(python: str, path: Path, generations: list[dict[str, Any]], batch_tokens: int) -> Tensor:
    """As _distances of the parity tests counts ours."""
    script = Path(__file__).parent / "peers" / "llamacpp_quality.py"
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(sequences_of(generations), file)
        file.flush()
        command = [python, script, "likeliest", path, "--sequences", file.name, "--batch", str(batch_tokens)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"golden_distance: the peer failed: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
    found = []
    for each, rows in zip(generations, json.loads(done.stdout), strict=True):
        start = len(each["prompt_ids"]) - 1  # a position tells of the token behind it
        for exact, two in zip(each["float32_top5_logprobs"], rows[start:], strict=False):
            expected = dict(exact)
            found += [abs(logprob - expected[token_id]) for token_id, logprob in two if token_id in expected]
    return tensor(found)


def _measure(
    model: str, generations: list[dict[str, Any]], batch_tokens: int, device: str, dtype: str
) -> tuple[Tensor, int]:
    options: dict[str, Any] = {"concurrency": min(batch_tokens, 16), "batch_tokens": batch_tokens}
    with LLM(model, context=1024, device=device, dtype=dtype, **options) as llm:
        distances, flips, _ = _distances(llm, generations)
    return distances, flips


if __name__ == "__main__":
    main()
