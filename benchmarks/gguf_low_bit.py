"""GGUF types below 4 bits: our search for grid points beside llama.cpp's, and the speed of both engines on one file.

    python benchmarks/gguf_low_bit.py quality qwen2.5-coder-1.5b --calibration TEXT --text TEXT [--types IQ2_M,IQ3_XXS]
    python benchmarks/gguf_low_bit.py errors qwen2.5-coder-1.5b --calibration TEXT
    python benchmarks/gguf_low_bit.py speed qwen2.5-coder-1.5b --types IQ1_S,IQ2_XXS [--repeat 3] [--threads 2]

`quality`: one importance for both; both files have the same type in every tensor, so that only the choice of codes
differs. llama.cpp's rows are quantized by its own library (package xllamacpp), perplexities are all taken by this
engine. `errors`: the same for some rows of the matrices of three layers, type by type, as the root of the weighted
squared error over the weighted squares: seconds where perplexities take minutes. `speed`: decode of 1 and prefill of
128 tokens against llama.cpp (package llama-cpp-python), interleaved, on a file of the model's shapes whose matrices are
random bytes of the type: values do not matter to speed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.gguf_writer import GGUFWriter, TensorSlot
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.sources import resolve
from tokenmill.config import EngineConfig
from tokenmill.evaluate.perplexity import measure_perplexity
from tokenmill.evaluate.windows import TextJob
from tokenmill.kernels.ggml_types import TYPES as GGML_TYPES
from tokenmill.quantize.ggml import blocks, export
from tokenmill.quantize.ggml.mixes import Mix
from tokenmill.quantize.ggml.source_tensors import SourceTensors
from tokenmill.quantize.gguf_job import GGUFJob, collect_importance

_SCALE_BYTES = {  # (place, value) of bytes that keep random blocks small
    "TQ1_0": ((52, 0x00), (53, 0x14)),
    "TQ2_0": ((64, 0x00), (65, 0x14)),
    "Q2_K": ((80, 0), (81, 0x14), (82, 0), (83, 0x14)),
    "Q3_K": ((108, 0), (109, 0x14)),
    "Q4_K": ((0, 0), (1, 0x10), (2, 0), (3, 0x10)),
    "NVFP4": tuple((byte, 1) for byte in range(4)),
    "IQ1_M": ((49, 0x0F), (51, 0x0F), (53, 0x4F), (55, 0x1F)),
}
MIXES = "IQ2_XXS,IQ2_XS,IQ2_M,IQ3_XXS,IQ3_S,IQ3_M"
MEMORY = 8 << 30
ROWS = 128


def importance_of(path: Path, arguments: argparse.Namespace) -> dict[str, Tensor]:
    kept = Path(arguments.importance) if arguments.importance else None
    if kept is not None and kept.exists():
        return dict(torch.load(kept))
    job = GGUFJob(
        str(path), Path("unused"), "imatrix", calibration=arguments.calibration, calibration_samples=arguments.samples
    )
    found = collect_importance(open_checkpoint(path), path, job, MEMORY, torch.device("cpu"), lambda *_: None)
    if kept is not None:
        torch.save(found, kept)
    return found


def quality(arguments: argparse.Namespace) -> None:
    from benchmarks.peers.ggml_rows import quantize_rows

    path = resolve(arguments.model[0]).path
    importance = importance_of(path, arguments)
    job = TextJob(arguments.text, arguments.context, limit_bytes=arguments.limit_bytes)

    def perplexity(model: Path) -> float:
        return measure_perplexity(str(model), EngineConfig(threads=arguments.threads), job).perplexity

    ours_rows, every_slot = export.quantize, export.plan_slots

    def some_slots(source: SourceTensors, mix: Mix, has_importance: bool) -> list[TensorSlot]:
        """The mix for some layers; all else as the source has it, whose bytes are copied."""
        slots = []
        for tensor, slot in zip(source.tensors, every_slot(source, mix, has_importance), strict=True):
            layer = slot.name.split(".")[1] if slot.name.startswith("blk.") else ""
            chosen = layer and int(layer) % arguments.every == arguments.every // 2
            stored = source.checkpoint.tensor(tensor.source).type_name if not chosen else slot.type_name
            slots.append(replace(slot, type_name=stored))
        return slots

    if arguments.every > 1:
        export.plan_slots = some_slots
    print("| type | bits per weight | perplexity | llama.cpp's codes | ratio | seconds | llama.cpp's |")
    print("|---|---|---|---|---|---|---|")
    print(f"| source | | {perplexity(path):.3f} | | | | |", flush=True)
    folder = Path(arguments.out or tempfile.mkdtemp())
    for mix in arguments.types.split(","):
        found, seconds, bits = [], [], 0.0
        for name, rows in (("ours", ours_rows), ("llamacpp", quantize_rows)):
            file = folder / f"{mix}.{name}.gguf"
            export.quantize = rows
            report = export.quantize_gguf(open_checkpoint(path), file, mix, importance)
            bits = report.bits_per_weight
            found.append(perplexity(file))
            seconds.append(report.seconds)
            if not arguments.out or name != "ours":
                file.unlink()
        row = [mix, f"{bits:.2f}", *(f"{each:.3f}" for each in found), f"{found[0] / found[1]:.3f}"]
        print("|", " | ".join([*row, *(f"{each:.0f}" for each in seconds)]), "|", flush=True)
    export.quantize = ours_rows


def errors(arguments: argparse.Namespace) -> None:
    from benchmarks.peers.ggml_rows import quantize_rows

    path = resolve(arguments.model[0]).path
    importance = importance_of(path, arguments)
    source = SourceTensors(open_checkpoint(path))
    layers = source.description.num_layers
    wanted = {f"model.layers.{layer}." for layer in (1, layers // 2, layers - 2)}
    chosen = []
    for tensor in source.tensors:
        prefix = tensor.source.removesuffix(".weight")
        if prefix in importance and prefix.startswith(tuple(wanted)) and tensor.shape[-1] % 256 == 0:
            chosen.append((next(iter(source.float_rows(tensor)))[1][:ROWS], importance[prefix]))
    print(f"{len(chosen)} matrices, {ROWS} rows of each")
    print("| type | error | llama.cpp's | ratio | ns per weight | llama.cpp's |")
    print("|---|---|---|---|---|---|")
    for name in arguments.types.split(","):
        cells = []
        for quantizer in (blocks.quantize, quantize_rows):
            squared = total = seconds = 0.0
            for rows, weights in chosen:
                begin = time.perf_counter()
                packed = quantizer(name, rows, weights)
                seconds += time.perf_counter() - begin
                squared += float((weights * (blocks.dequantize(name, packed) - rows).square()).sum())
                total += float((weights * rows.square()).sum())
            cells.append(((squared / total) ** 0.5, seconds * 1e9 / sum(rows.numel() for rows, _ in chosen)))
        (ours, our_time), (theirs, their_time) = cells
        print(
            f"| {name} | {ours:.4f} | {theirs:.4f} | {ours / theirs:.3f} | {our_time:.0f} | {their_time:.0f} |",
            flush=True,
        )


def made_up(checkpoint: Checkpoint, type_name: str, file: Path) -> None:
    """A file with the shapes of a model: every matrix of its blocks is random bytes of the type, with small scales."""
    plan = export.plan_gguf(checkpoint, "Q8_0")
    slots = [
        replace(slot, type_name=type_name) if slot.name.startswith("blk.") and slot.type_name == "Q8_0" else slot
        for slot in plan.slots
    ]
    generator = torch.Generator().manual_seed(0)
    with GGUFWriter(file, plan.pairs, slots) as writer:
        for slot in slots:
            if slot.type_name == "F32":
                writer.append(torch.ones(slot.nbytes // 4).view(torch.uint8))
                continue
            kind = GGML_TYPES[slot.type_name]
            rows = slot.nbytes // kind.row_bytes(slot.shape[-1])
            for begin in range(0, rows, 1024):
                size = (min(1024, rows - begin) * slot.shape[-1] // kind.block_size, kind.block_bytes)
                blocks_of = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
                for byte, value in _SCALE_BYTES.get(slot.type_name, ((0, 0x00), (1, 0x14))):
                    blocks_of[:, byte] = value
                writer.append(blocks_of.view(-1, kind.row_bytes(slot.shape[-1])))


def speed(arguments: argparse.Namespace) -> None:
    from benchmarks.cpu_vs_llamacpp import Ours
    from benchmarks.peers.peer_process import PeerProcess

    checkpoint = open_checkpoint(resolve(arguments.model[0]).path)
    folder = Path(tempfile.mkdtemp())

    print("| type | decode 1 | llama.cpp | ratio | prefill 128 | llama.cpp | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name in arguments.types.split(","):
        path = folder / f"{name}.gguf"
        made_up(checkpoint, name, path)
        peer, ours = PeerProcess(path, arguments.threads), Ours(path, arguments.threads)
        generator = random.Random(1)
        prompt = [generator.randrange(10, peer.vocab_size - 10) for _ in range(128)]
        pairs = {"decode": [], "prefill": []}  # type: dict[str, list[tuple[float, float]]]
        for _ in range(arguments.repeat):
            pairs["decode"].append((peer.decode([prompt[:16]], 24), ours.decode([prompt[:16]], 24)))
            pairs["prefill"].append((peer.prefill(prompt), ours.prefill(prompt)))
        cells = [path.stem]
        for both in pairs.values():
            theirs, mine = (statistics.median(column) for column in zip(*both, strict=True))
            ratio = statistics.median(mine / theirs for theirs, mine in both)
            cells += [f"{mine:.1f}", f"{theirs:.1f}", f"{ratio:.2f}"]
        print("|", " | ".join(cells), "|", flush=True)
        peer.close()
        del ours
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["quality", "errors", "speed"])
    parser.add_argument("model", nargs="+")
    parser.add_argument("--types", default=MIXES, help="mixes; of `errors`: types")
    parser.add_argument("--calibration", type=Path, default=None)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--importance", default="", help="file that keeps the importance between runs")
    parser.add_argument("--text", type=Path, default=Path())
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--limit-bytes", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=1, help="only each n-th layer gets the type (GGUF sources)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", default="", help="folder that keeps our files")
    arguments = parser.parse_args()
    {"quality": quality, "errors": errors, "speed": speed}[arguments.what](arguments)


if __name__ == "__main__":
    main()
