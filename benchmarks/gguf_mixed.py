"""Mixed precision in GGUF against llama.cpp's own mixes: same bytes or fewer, same importance matrix; it measures both.

    python benchmarks/gguf_mixed.py smollm2 gemma3-270m --peer /tmp/llamacpp/bin/python --calibration calibration.txt
        --text wikitext2-raw.test.first-half.txt [--types Q4_K_M,Q3_K_M,Q2_K] [--without Q4_1,Q5_1] [--out FOLDER]

`--peer`: a Python that has llama-cpp-python, whose library quantizes and measures. Packaged models are quantized
already: they are first expanded to F16, which is the reference for both sides and the source of both. `--without`
leaves out types, above all the one in which the package was stored and those whose grid contains its (of Q4_1: Q5_1):
they fit the expanded weights perfectly, which says nothing about other models. After each row the types of our file are
printed on stderr, so that it shows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from importance_file import write_importance

from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.sources import resolve
from tokenmill.quantize.ggml.blocks import BLOCK_TYPES
from tokenmill.quantize.ggml.candidates import Rounder
from tokenmill.quantize.ggml.export import quantize_gguf
from tokenmill.quantize.gguf_job import GGUFJob, MixPlan, pack_types, plan_mix, read_sequences
from tokenmill.quantize.mixed_gguf import MixSearch

_PEER = Path(__file__).parent / "peers" / "llamacpp_quality.py"


def peer(python: str, *words: object) -> Any:
    done = subprocess.run([python, str(_PEER), *map(str, words)], stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)


class Subject:
    """One model: its F16 file, importance and measured matrices."""

    def __init__(self, model: str, folder: Path, arguments: argparse.Namespace) -> None:
        self.folder, self.name, self._arguments = folder, model, arguments
        self.plan: MixPlan
        self.reference = folder / f"{model}.F16.gguf"
        if not self.reference.exists():
            quantize_gguf(open_checkpoint(resolve(model).path), self.reference, "F16")
        self.checkpoint = open_checkpoint(self.reference)
        job = self.job = GGUFJob(
            str(self.reference),
            folder,
            "mixed",
            calibration=arguments.calibration,
            calibration_samples=arguments.samples,
            calibration_length=arguments.length,
            device="cpu",
            types=tuple(name for name in BLOCK_TYPES if name not in arguments.without.split(",")),
        )
        self.sequences = read_sequences(self.checkpoint, self.reference, job)
        self.imatrix = folder / f"{model}.imatrix.gguf"
        self.importance = write_importance(self.reference, job, self.imatrix)

    def search(self, mix: str) -> MixSearch:
        self.plan = plan_mix(self.checkpoint, self.reference, replace(self.job, type_name=mix))
        forecast = self.plan.forecast
        print(f"{self.name}: forecast {forecast.seconds:.0f} s", file=sys.stderr)
        started = time.monotonic()
        rounder = Rounder(self.plan.source, self.plan.matrices, self.importance)
        search = MixSearch(self.plan.source, rounder, self.sequences, forecast)
        search.measure_worth(lambda *_: None)
        print(f"{self.name}: worth measured in {time.monotonic() - started:.0f} s", file=sys.stderr)
        return search

    def make(self, mix: str, limit: int, search: MixSearch) -> Path:
        """Our file of at most `limit` bytes."""
        path = self.folder / f"{self.name}.mixed-{mix}.gguf"
        plan = plan_mix(self.checkpoint, self.reference, replace(self.job, type_name=mix, size=limit))
        started = time.monotonic()
        choice = search.choose(plan.request)
        chosen = time.monotonic()
        packed = None
        if self._arguments.feedback:
            packed = pack_types(self.plan, choice, 0, torch.device("cpu"), lambda *_: None)
        report = quantize_gguf(self.checkpoint, path, mix, self.importance, types=choice.types, packed=packed)
        seconds = chosen - started, time.monotonic() - chosen
        print(f"{self.name} {mix}: {dict(Counter(choice.types.values()))}", file=sys.stderr)
        print(f"{self.name} {mix}: chosen in {seconds[0]:.0f} s, written in {seconds[1]:.0f} s", file=sys.stderr)
        assert report.nbytes <= limit, (report.nbytes, limit)
        return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="+")
    parser.add_argument("--peer", required=True, help="a Python that has llama-cpp-python")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--types", default="Q4_K_M,Q3_K_M,Q2_K")
    parser.add_argument("--without", default="", help="types that our mix may not use, comma-separated")
    parser.add_argument("--feedback", action=argparse.BooleanOptionalAction, default=True, help="errors pushed on")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("gguf-mixed"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print("| model | bytes of | llama.cpp | ours | divergence | ours | ratio | perplexity | ours | F16 |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for model in arguments.model:
        subject = Subject(model, arguments.out, arguments)
        search: MixSearch | None = None
        for mix in arguments.types.split(","):
            theirs = arguments.out / f"{model}.llamacpp-{mix}.gguf"
            peer(arguments.peer, "quantize", subject.reference, theirs, mix, "--imatrix", subject.imatrix)
            search = search or subject.search(mix)
            ours = subject.make(mix, theirs.stat().st_size, search)
            words = ["--text", arguments.text, "--context", arguments.context, "--chunks", arguments.chunks]
            base, one, two = peer(arguments.peer, "compare", subject.reference, theirs, ours, *words)
            ratio = two["divergence"] / one["divergence"]
            row = [model, mix, f"{one['bytes']:,}", f"{two['bytes']:,}", f"{one['divergence']:.5f}"]
            row += [f"{two['divergence']:.5f}", f"{ratio:.3f}", f"{one['perplexity']:.3f}"]
            print("|", " | ".join([*row, f"{two['perplexity']:.3f}", f"{base['perplexity']:.3f}"]), "|", flush=True)


if __name__ == "__main__":
    main()
