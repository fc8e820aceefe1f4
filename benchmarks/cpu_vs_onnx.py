"""tokenmill against onnxruntime-genai on a CPU: the same model in 4-bit groups of 32, the same threads and run.

    python -m venv ort && ort/bin/pip install onnxruntime-genai onnx onnx-ir 'torch>=2.11,<2.14' transformers
    ort/bin/python -m onnxruntime_genai.models.builder -m NAME -i CHECKPOINT -o FOLDER -p int4 -e cpu -c CACHE \
        --extra_options block_size=32 accuracy_level=4 prune_lm_head=true
    tokenmill quantize CHECKPOINT --format gguf --type Q4_0 --no-gate --out model.gguf
    python benchmarks/cpu_vs_onnx.py FOLDER model.gguf --python ort/bin/python [--threads 2] [--repeat 3]

CHECKPOINT is a folder of Hugging Face's layout. The builder's groups are symmetric with a float32 scale (5 bits a
weight, Q4_0 4.5), inputs are rounded to int8 on both sides; its embedding stays float32. Runs are interleaved, medians
compared: prefill of 512 tokens, decode of 128 at batch 1, of 32 at batch 4 and 16 after 16 tokens.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.cpu_vs_llamacpp import Ours
from benchmarks.peers.peer_process import PeerProcess
from tokenmill.checkpoint.sources import resolve


def compare(name: str, peer: PeerProcess, ours: Ours, repeat: int) -> None:
    """Prints the cases that a peer of `prefill` and `decode` is measured on; interleaved, medians."""
    generator = random.Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[generator.randrange(10, peer.vocab_size - 10) for _ in range(length)] for _ in range(count)]

    def prefill() -> tuple[float, float]:
        (tokens,) = prompts(1, 512)
        return peer.prefill(tokens), ours.prefill(tokens)

    def decode(batch: int, steps: int) -> Callable[[], tuple[float, float]]:
        def once() -> tuple[float, float]:
            given = prompts(batch, 16)
            return peer.decode(given, steps), ours.decode(given, steps)

        return once

    cases = {"prefill 512": prefill, "decode batch 1": decode(1, 128)}
    cases |= {f"decode batch {batch}": decode(batch, 32) for batch in (4, 16)}
    for case, once in cases.items():
        pairs = [once() for _ in range(repeat)]
        theirs, mine = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{case:16} {name} {theirs:8.1f}  tokenmill {mine:8.1f} tok/s  ratio {mine / theirs:5.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="made by onnxruntime-genai's builder")
    parser.add_argument("model", help="alias or .gguf of the same model")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has onnxruntime-genai")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    peer = PeerProcess(arguments.folder, arguments.threads, "onnx_peer", arguments.python)
    ours = Ours(resolve(arguments.model).path, arguments.threads)
    compare("onnxruntime-genai", peer, ours, arguments.repeat)
    peer.close()


if __name__ == "__main__":
    main()
