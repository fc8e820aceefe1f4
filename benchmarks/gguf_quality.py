"""Our GGUF quantizers beside llama.cpp's: the same type, the same bytes, the perplexity of the same text.

    python benchmarks/gguf_quality.py stories15m smollm2 [--types Q4_K_M,Q6_K] [--kernels ref] [--shared ../shared]
    python benchmarks/gguf_quality.py qwen2.5-coder-1.5b          (minutes per type)

llama.cpp's figures are those of `llama-quantize` and `llama-perplexity` (master of August 2026, its int8 activations on
a Neoverse-N1), recorded below: both programs are deterministic. Ours are taken now, with the default kernels (int8
activations as well) unless --kernels says otherwise. stories15m is written with an output matrix of its own, as
llama.cpp's converter writes llama2.c files. GGUF sources are quantized again from their dequantized weights; tensors
that are already of the wanted type are copied, by both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.sources import resolve
from tokenmill.quantize.ggml.export import quantize_gguf


@dataclass(frozen=True)
class Subject:
    text: str
    context: int
    limit_bytes: int
    untied_output: bool
    peer: dict[str, tuple[float, int | None]]  # type -> llama.cpp's perplexity, its bytes where they were recorded


SUBJECTS = {
    "stories15m": Subject(
        "stories15m-samples.eval.txt",
        256,
        20_000,
        True,
        {
            "F32": (5.9031, None),
            "Q8_0": (5.9128, 26_671_360),
            "Q6_K": (5.9256, 26_349_952),
            "Q5_K_M": (6.0353, 21_952_768),
            "Q5_1": (6.0252, 21_925_120),
            "Q5_0": (6.0902, 20_975_872),
            "Q4_K_M": (6.0356, 20_986_240),
            "Q4_K_S": (5.9924, 20_830_720),
            "Q4_1": (6.4356, 20_026_624),
            "Q4_0": (6.4431, 19_077_376),
            "IQ4_NL": (6.3071, 19_077_376),
            "IQ4_XS": (6.3381, 19_035_904),
            "Q3_K_M": (6.2159, 19_212_160),
            "Q2_K": (6.6790, 18_901_120),
        },
    ),
    "smollm2": Subject(
        "wikitext2-raw.test.first-half.txt",
        512,
        20_000,
        False,
        {
            "F16": (25.4776, None),
            "Q8_0": (25.6033, None),
            "Q4_1": (25.5653, 98_362_432),
            "Q6_K": (25.7896, 138_382_912),
            "Q5_K_M": (27.5009, 112_103_488),
            "Q5_0": (27.2765, 104_997_952),
            "Q4_K_M": (27.0065, None),
            "IQ4_NL": (30.0987, 92_058_688),
            "Q4_0": (31.4578, None),
            "Q3_K_M": (29.1712, 93_510_208),
            "Q2_K": (35.1622, 88_201_792),
        },
    ),
    "qwen2.5-coder-1.5b": Subject(
        "wikitext2-raw.test.first-half.txt",
        512,
        10_000,
        False,
        {
            "Q6_K": (13.5185, 1_464_178_752),
            "Q5_K_M": (13.5604, 1_285_494_336),
            "Q4_K_M": (13.5272, 1_117_320_768),
            "Q3_K_M": (14.3427, 924_456_000),
            "Q2_K": (17.4215, 752_880_192),
        },
    ),
}


def perplexity(file: Path, subject: Subject, shared: Path, kernels: str) -> float:
    command = [sys.executable, "-m", "tokenmill", "eval", "perplexity", str(file), "--json"]
    command += ["--text", str(shared / "data" / "text" / subject.text), "--context", str(subject.context)]
    command += ["--limit-bytes", str(subject.limit_bytes), *(["--kernels", kernels] if kernels else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return float(json.loads(done.stdout)["perplexity"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="+", choices=SUBJECTS)
    parser.add_argument("--types", default="", help="comma-separated (default: all recorded ones)")
    parser.add_argument("--kernels", default="", help="ref: float32 activations; empty: the default kernels")
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    arguments = parser.parse_args()
    print("| model | type | bytes | llama.cpp | perplexity | llama.cpp | ratio | mean error | seconds |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model in arguments.model:
        subject = SUBJECTS[model]
        checkpoint = open_checkpoint(resolve(model).path)
        for mix in arguments.types.split(",") if arguments.types else subject.peer:
            theirs, their_bytes = subject.peer[mix]
            with tempfile.TemporaryDirectory() as directory:
                file = Path(directory) / f"{mix}.gguf"
                report = quantize_gguf(checkpoint, file, mix, untied_output=subject.untied_output)
                ours = perplexity(file, subject, arguments.shared, arguments.kernels)
            written = [tensor.relative_error for tensor in report.tensors if tensor.relative_error]
            error = f"{sum(written) / len(written):.4f}" if written else "-"
            size = f"{their_bytes:,}" if their_bytes else "-"
            row = [model, mix, f"{report.nbytes:,}", size, f"{ours:.4f}", f"{theirs:.4f}", f"{ours / theirs:.4f}"]
            print("|", " | ".join([*row, error, f"{report.seconds:.0f}"]), "|", flush=True)


if __name__ == "__main__":
    main()
