"""Perplexity of any recipes on one small model, side by side: one line for each recipe on the command line.

    python benchmarks/quantization_methods.py gptq,bits=4 spinquant+gptq,bits=4 sparsegpt,pattern=2:4

A recipe is METHOD[,key=value...]: `bits`, `group`, `symmetric`, `activations` and `format` are the flags of `tokenmill
quantize` (groups of 32, symmetric and 4 bits unless said), everything else is an option of the method. `float` is the
model as it is; a path to a directory is scored as it is. `lorc=R` is --low-rank R, with the adapter applied and counted
as 16-bit floats, `drop=N` leaves the N cheapest blocks out, `tune=N` is --tune-scales. Calibrates on and scores texts
of shared/data, floats stay float32, products run in the reference kernels, so that only the scheme rounds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tokenmill.config import EngineConfig
from tokenmill.evaluate.perplexity import measure_perplexity
from tokenmill.evaluate.windows import TextJob
from tokenmill.quantize.finish import GateRequest
from tokenmill.quantize.job import QuantizeJob, prepare, run_job
from tokenmill.quantize.low_rank import FOLDER
from tokenmill.quantize.recipe import RecipeRequest
from tokenmill.quantize.schemes import METHODS


def main() -> None:
    arguments = parse_arguments()
    print("| recipe | perplexity | linears, bits | seconds |\n|---|---|---|---|")
    for spec in arguments.recipes:
        bits, seconds = 32.0, 0.0
        folder = Path(tempfile.mkdtemp(prefix="recipe-")) / "model"
        target = arguments.model if spec == "float" else spec
        if spec != "float" and not Path(spec).exists():
            begin = time.monotonic()
            report = run_job(prepare(make_job(arguments, spec, folder)))
            bits, seconds, target = report.bits_per_weight, time.monotonic() - begin, str(folder)
            if tuned := report.fidelity.get("tuned"):
                print(
                    f"{spec}: divergence of held-out sequences {tuned['before']:.4f} to {tuned['after']:.4f}",
                    file=sys.stderr,
                )
        adapters: tuple[str, ...] = ()
        if (folder / FOLDER).is_dir():
            kept = report.fidelity["low_rank"]["bytes"]
            bits += 4.0 * kept / sum(layer["num_weights"] for layer in report.layers)  # as 16-bit floats
            adapters = (f"lorc={folder / FOLDER}",)
        text = TextJob(arguments.text, arguments.context, arguments.limit_bytes)
        options = EngineConfig(kernels="ref", device="cpu", threads=arguments.threads or None, lora=adapters)
        scored = measure_perplexity(target, options, text)
        print(f"| {spec} | {scored.perplexity:.4f} +/- {scored.stderr:.3f} | {bits:.3f} | {seconds:.0f} |", flush=True)
        if arguments.keep and folder.exists():
            shutil.move(folder, arguments.keep)
        shutil.rmtree(folder.parent)


def settings_of(spec: str) -> dict[str, str]:
    return dict(setting.partition("=")[::2] for setting in spec.split(",")[1:])


def make_job(arguments: argparse.Namespace, spec: str, out: Path) -> QuantizeJob:
    method, values = spec.split(",")[0], settings_of(spec)
    own = ("format", "activations", "lorc", "drop", "tune")
    last = METHODS.get(method.split("+")[-1])
    free = last is not None and last.free_bits and last.scheme.element == "int"
    bits, group = values.pop("bits", "4" if free else ""), values.pop("group", "32" if free else "")
    symmetric = values.pop("symmetric", "true" if free and method != "hqq" else "")
    request = RecipeRequest(
        method,
        int(bits) if bits else None,
        int(group) if group else None,
        json.loads(symmetric) if symmetric else None,
        tuple((key, value) for key, value in values.items() if key not in own),
        activations=values.get("activations", ""),
    )
    return QuantizeJob(
        model=arguments.model,
        out=out,
        recipe=request,
        format=values.get("format", ""),
        dtype="float32",
        calibration=arguments.calibration,
        calibration_samples=arguments.samples,
        calibration_length=arguments.context,
        threads=arguments.threads,
        drop_layers=int(values.get("drop", 0)),
        low_rank=int(values.get("lorc", 0)),
        tune=int(values.get("tune", 0)),
        gate=GateRequest(enabled=False),
    )


def parse_arguments() -> argparse.Namespace:
    texts = Path(__file__).parents[2] / "shared/data/text"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--model", default="stories15m")
    parser.add_argument("--text", type=Path, default=texts / "stories15m-samples.eval.txt")
    parser.add_argument("--calibration", type=Path, default=texts / "stories15m-samples.calibration.txt")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--limit-bytes", type=int, default=0, help="of the scored text; 0: all of it")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: all")
    parser.add_argument("--keep", type=Path, help="directory to move the (last) result to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
