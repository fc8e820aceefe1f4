"""A mixture of experts on the CPU against llama.cpp: the same file, the same threads, in the same run.

    pip install llama-cpp-python        # compiles for about twenty minutes
    python benchmarks/cpu_experts.py [--threads 2] [--repeat 5] [--only decode] [--json]

The file is made once (`--file`): Qwen3-MoE's architecture with 2.0 billion weights, 32 experts of which a token uses 4,
random blocks in the types of the Q4_K_M mix. Runs are interleaved (peer, ours, peer, ours, ...) and medians compared.
Prefill of 512 tokens; decode at batch 1, 4 and 16, beside the floor: the bytes of the weights that a step must read,
experts hit by at least one token counted once, over what the machine reads with as many threads.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.cpu_vs_llamacpp import Ours
from benchmarks.peers.peer_process import PeerProcess
from tokenmill.checkpoint.gguf_writer import GGUFWriter, TensorSlot, Value, pack_value
from tokenmill.checkpoint.sources import cache_root
from tokenmill.kernels import cpu
from tokenmill.quantize.ggml.mixes import Shape, choose_types, find_mix

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 24, 1024, 16, 8, 128
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_SIZE, VOCABULARY = 32, 4, 768, 32768
ROWS_AT_A_TIME = 8192


def attention_shapes(hidden: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
    """A Qwen3 block up to its MLP, by the middle of the GGUF name."""
    queries, values = heads * head_dim, kv_heads * head_dim
    return {
        "attn_norm": (hidden,),
        "attn_q": (queries, hidden),
        "attn_k": (values, hidden),
        "attn_v": (values, hidden),
        "attn_q_norm": (head_dim,),
        "attn_k_norm": (head_dim,),
        "attn_output": (hidden, queries),
        "ffn_norm": (hidden,),
    }


def shapes() -> dict[str, tuple[int, ...]]:
    """GGUF name -> shape, row-major, in the order of the file."""
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        for name, shape in {
            **attention_shapes(HIDDEN, HEADS, KV_HEADS, HEAD_DIM),
            "ffn_gate_inp": (EXPERTS, HIDDEN),
            "ffn_gate_exps": (EXPERTS, EXPERT_SIZE, HIDDEN),
            "ffn_up_exps": (EXPERTS, EXPERT_SIZE, HIDDEN),
            "ffn_down_exps": (EXPERTS, HIDDEN, EXPERT_SIZE),
        }.items():
            found[f"blk.{layer}.{name}.weight"] = shape
    return found | {"output_norm.weight": (HIDDEN,), "output.weight": (VOCABULARY, HIDDEN)}


def slots() -> list[TensorSlot]:
    model = Shape(LAYERS, HEADS, KV_HEADS, has_output=True, has_importance=False)
    types = choose_types(find_mix("Q4_K_M"), shapes(), model)
    return [TensorSlot(name, shape, types[name]) for name, shape in shapes().items()]


def metadata() -> dict[str, Value]:
    values: dict[str, Value] = {"general.architecture": "qwen3moe", "general.name": "random experts"}
    values |= {
        f"qwen3moe.{key}": value
        for key, value in {
            "block_count": LAYERS,
            "context_length": 4096,
            "embedding_length": HIDDEN,
            "feed_forward_length": EXPERT_SIZE,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.key_length": HEAD_DIM,
            "attention.value_length": HEAD_DIM,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1e6,
            "expert_count": EXPERTS,
            "expert_used_count": EXPERTS_PER_TOKEN,
            "expert_feed_forward_length": EXPERT_SIZE,
        }.items()
    }
    return values | vocabulary(VOCABULARY)


def vocabulary(count: int) -> dict[str, Value]:
    """A byte-level vocabulary: one token per byte as GPT-2 writes them, and names without a meaning."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    tokens = [chr(byte) for byte in printable] + [chr(256 + number) for number in range(len(hidden))]
    tokens += ["ab", *(f"[{number}]" for number in range(count - len(tokens) - 1))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * count,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": count - 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def _halves(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).view(np.uint8).reshape(len(values), 2)


def random_blocks(type_name: str, count: int, generator: np.random.Generator) -> np.ndarray:
    """`count` blocks as bytes: random codes and scales, weights about zero on average, deviation about 1/32."""
    factor = generator.uniform(0.7, 1.3, count)
    if type_name == "Q4_K":  # d, dmin, 12 bytes of 6-bit scales and minimums, 128 of codes
        blocks = generator.integers(0, 256, (count, 144), dtype=np.uint8)
        blocks[:, 0:2], blocks[:, 2:4] = _halves(1.2e-4 * factor), _halves(9e-4 * factor)
    elif type_name == "Q4_0":  # d, 16 bytes of codes
        blocks = generator.integers(0, 256, (count, 18), dtype=np.uint8)
        blocks[:, 0:2] = _halves(6.5e-3 * factor)
    elif type_name == "Q8_0":  # d, 32 codes
        blocks = generator.integers(0, 256, (count, 34), dtype=np.uint8)
        blocks[:, 0:2] = _halves(4.2e-4 * factor)
    else:  # Q6_K: 192 bytes of codes, 16 signed scales, d
        assert type_name == "Q6_K", type_name
        blocks = generator.integers(0, 256, (count, 210), dtype=np.uint8)
        blocks[:, 208:210] = _halves(2.4e-5 * factor)
    return blocks


def make_file(path: Path) -> None:
    generator = np.random.default_rng(0)
    pairs = {key: pack_value(value) for key, value in metadata().items()}
    with GGUFWriter(path, pairs, slots()) as writer:
        for slot in slots():
            rows, cols = int(np.prod(slot.shape[:-1])), slot.shape[-1]
            if slot.type_name == "F32":
                norm = slot.name.endswith("_norm.weight")
                numbers = np.ones(slot.shape) if norm else generator.normal(0, HIDDEN**-0.5, slot.shape)
                writer.append(torch.from_numpy(numbers.astype(np.float32)).view(torch.uint8))
                continue
            for begin in range(0, rows, ROWS_AT_A_TIME):
                count = min(ROWS_AT_A_TIME, rows - begin) * (cols // 256)
                writer.append(torch.from_numpy(random_blocks(slot.type_name, count, generator)))


def bytes_of_step(batch: int) -> float:
    """Weights read by a decode step, routers choosing evenly."""
    hit = 1 - (1 - EXPERTS_PER_TOKEN / EXPERTS) ** batch
    total = 0.0
    for slot in slots():
        if slot.name != "token_embd.weight":  # a row each
            total += slot.nbytes * (hit if re.search("_exps", slot.name) else 1)
    return total


def measure(path: Path, threads: int, repeat: int, only: str) -> dict[str, dict[str, float]]:
    peer, ours = PeerProcess(path, threads), Ours(path, threads)
    generator = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [generator.randrange(10, VOCABULARY - 10) for _ in range(length)]

    def prefill() -> tuple[float, float]:
        tokens = prompt(512)
        return peer.prefill(tokens), ours.prefill(tokens)

    def decode(batch: int, steps: int) -> Callable[[], tuple[float, float]]:
        def once() -> tuple[float, float]:
            prompts = [prompt(16) for _ in range(batch)]
            return peer.decode(prompts, steps), ours.decode(prompts, steps)

        return once

    cases = {"prefill 512": prefill}
    floors = {}
    bandwidth = cpu.module().read_bandwidth(cpu.pool(), 256 << 20)
    for batch, steps in ((1, 96), (4, 48), (16, 24)):
        name = f"decode batch {batch}"
        cases[name], floors[name] = decode(batch, steps), batch * bandwidth / bytes_of_step(batch)
    table = {}
    for name, once in cases.items():
        if only not in name:
            continue
        once()  # warm: pages of the file, clocks
        theirs, mine = (statistics.median(column) for column in zip(*(once() for _ in range(repeat)), strict=True))
        table[name] = {"llama.cpp": theirs, "tokenmill": mine, "ratio": mine / theirs}
        print(f"{name:16} llama.cpp {theirs:7.1f}  tokenmill {mine:7.1f} tok/s  ratio {mine / theirs:5.2f}", end="")
        if name in floors:
            table[name]["floor"] = floors[name]
            print(f"  floor {floors[name]:7.1f} tok/s, {100 * mine / floors[name]:.0f} % of it", end="")
        print(flush=True)
    peer.close()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=cache_root() / "benchmarks" / "experts-2b-q4_k_m.gguf")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", default="", help="measurements whose name has this in it, such as 'decode'")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    arguments = parser.parse_args()
    if not arguments.file.exists():
        arguments.file.parent.mkdir(parents=True, exist_ok=True)
        make_file(arguments.file)
    table = measure(arguments.file, arguments.threads, arguments.repeat, arguments.only)
    if arguments.json:
        print(json.dumps(table))


if __name__ == "__main__":
    main()
