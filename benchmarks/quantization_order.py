"""The order of quantization methods: the perplexity of each on two small models, and how much of the loss of plain
rounding each one avoids.

    python benchmarks/quantization_order.py [--models stories15m,smollm2=FILE] [--methods gptq,awq] [--bits 3,4]
                                            [--quick]

Integer methods share one scheme per model (groups of 32 for stories15m, whose width is 288, of 64 for smollm2; no zero
points unless --asymmetric) and one calibration text, which is not the text that is scored. Scoring is llama.cpp's
protocol on the CPU with float activations (the `ref` kernels) except where the scheme rounds them itself. A finished
row is kept under --cache, with the GPU that quantized if there was one, and not computed again; --quick calibrates and
scores on a quarter. Takes hours for smollm2 on two cores, minutes with a GPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tokenmill.config import EngineConfig
from tokenmill.evaluate.perplexity import measure_perplexity
from tokenmill.evaluate.windows import TextJob
from tokenmill.quantize.finish import GateRequest
from tokenmill.quantize.job import QuantizeJob, prepare, run_job
from tokenmill.quantize.recipe import RecipeRequest


@dataclass(frozen=True)
class Subject:
    group_size: int
    text: str
    context: int
    calibration: str
    samples: int
    limit_bytes: int = 20_000


@dataclass(frozen=True)
class Row:
    model: str
    method: str  # "float": the model as it is
    bits: int
    perplexity: float
    stderr: float
    bytes: int  # of the linears in blocks, with scales; the rest is the same for all
    seconds: float
    device: str = ""  # that quantized, where it was a GPU


SUBJECTS = {
    "stories15m": Subject(32, "stories15m-samples.eval.txt", 256, "stories15m-samples.calibration.txt", 40),
    "smollm2": Subject(64, "wikitext2-raw.test.first-half.txt", 512, "wikitext2-tokens.valid.txt", 32),
}
INTEGER_METHODS = ("rtn", "awq", "gptq", "autoround", "awq+gptq", "rotation", "rotation+gptq", "hqq", "mixed")
FIXED_METHODS = {  # methods with a fixed number of bits
    "nf4": (4, RecipeRequest("nf4")),
    "smoothquant": (8, RecipeRequest("smoothquant")),
    "smoothquant+gptq": (8, RecipeRequest("smoothquant+gptq")),
    "rotation+smoothquant": (8, RecipeRequest("rotation+smoothquant")),
    "fp8": (8, RecipeRequest("fp8")),
    "fp8-compensated": (8, RecipeRequest("fp8", options=(("compensate", True),))),
}
_MARK = r" \*"  # marks rows that a GPU quantized
ASYMMETRIC = ("hqq",)  # regardless of --asymmetric


def main() -> None:
    arguments = parse_arguments()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    methods = arguments.methods.split(",")
    keys = [(name, int(bits)) for bits in arguments.bits.split(",") for name in methods if name in INTEGER_METHODS]
    keys += [(name, FIXED_METHODS[name][0]) for name in methods if name in FIXED_METHODS]
    table: dict[str, dict[tuple[str, int], Row]] = {}
    for model in arguments.models.split(","):
        rows = {key: measure(arguments, model, *key) for key in [("float", 32), *keys]}
        table[model.partition("=")[0]] = {key: row for key, row in rows.items() if row is not None}
    print_table(table, sorted(keys, key=lambda key: key[1]))


def measure(arguments: argparse.Namespace, model: str, method: str, bits: int) -> Row | None:
    """From the cache, or by a job and its perplexity. `model`: a subject, or NAME=PATH where its file is elsewhere."""
    model, _, source = model.partition("=")
    kind = "-".join([model, method, str(bits), "asym" if arguments.asymmetric else "sym"])
    path = arguments.cache / (f"quick-{kind}.json" if arguments.quick else f"{kind}.json")
    if path.exists():
        return Row(**json.loads(path.read_text()))
    if arguments.cached:
        return None
    print(f"{kind} ...", file=sys.stderr, flush=True)
    subject, folder = SUBJECTS[model], arguments.cache / f"{path.stem}.model"
    target, num_bytes, seconds, device = source or model, 0, 0.0, ""
    if method != "float":
        done = folder.with_suffix(".report")  # a killed job resumes by itself; a finished one is only scored
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            report = run_job(prepare(make_job(arguments, source or model, subject, method, bits, folder)))
            used = report.device if report.peak_device_bytes else ""
            done.write_text(json.dumps([weight_bytes(report.layers), report.seconds, used]))
        num_bytes, seconds, device = json.loads(done.read_text())
        target = str(folder)
    share = 4 if arguments.quick else 1
    job = TextJob(arguments.shared / "data/text" / subject.text, subject.context, subject.limit_bytes // share)
    scored = measure_perplexity(
        target, EngineConfig(kernels="ref", device="cpu", threads=arguments.threads or None), job
    )
    row = Row(model, method, bits, scored.perplexity, scored.stderr, num_bytes, round(seconds, 1), device)
    path.write_text(json.dumps(asdict(row)))
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_suffix(".report").unlink(missing_ok=True)
    return row


def make_job(
    arguments: argparse.Namespace, model: str, subject: Subject, method: str, bits: int, out: Path
) -> QuantizeJob:
    if method in INTEGER_METHODS:
        symmetric = None if method in ASYMMETRIC else not arguments.asymmetric
        request = RecipeRequest(method, bits, subject.group_size, symmetric)
    else:
        request = FIXED_METHODS[method][1]
        request = replace(request, group_size=subject.group_size) if method == "nf4" else request
    return QuantizeJob(
        model=model,
        out=out,
        recipe=request,
        dtype="float32",
        calibration=arguments.shared / "data/text" / subject.calibration,
        calibration_samples=subject.samples // (4 if arguments.quick else 1),
        calibration_length=subject.context,
        threads=arguments.threads,
        device=arguments.device,
        gate=GateRequest(enabled=False),
    )


def weight_bytes(layers: list[dict[str, object]]) -> int:
    return sum(int(str(layer["num_bytes"])) for layer in layers)


def print_table(table: Mapping[str, Mapping[tuple[str, int], Row]], keys: Sequence[tuple[str, int]]) -> None:
    """Markdown; "won back" is the share of the loss of plain rounding at the same bits that a method avoids."""
    for model, rows in table.items():
        row = rows["float", 32]
        print(f"{model}: float {row.perplexity:.4f} +/- {row.stderr:.2f}, groups of {SUBJECTS[model].group_size}")
    print("\n| bits | method |", " | ".join(f"{model} | won back" for model in table), "|")
    print("|---|---|" + "---|---|" * len(table))
    for method, bits in keys:
        cells = [cell for rows in table.values() for cell in table_cells(rows, method, bits)]
        if any(cells):
            print(f"| {bits} | {method} |", " | ".join(cells), "|")
    devices = {row.device for rows in table.values() for row in rows.values() if row.device}
    print(f"\n{_MARK.strip()} quantized on {', '.join(sorted(devices))}" if devices else "")


def table_cells(rows: Mapping[tuple[str, int], Row], method: str, bits: int) -> tuple[str, str]:
    """(perplexity and loss, marked where a GPU quantized; what is won back)."""
    if (method, bits) not in rows:
        return "", ""
    row, original = rows[method, bits], rows["float", 32].perplexity
    cell = f"{row.perplexity:.4f} ({row.perplexity / original - 1:+.2%}){_MARK if row.device else ''}"
    plain = rows.get(("rtn", bits))
    if plain is None or method == "rtn" or plain.perplexity <= original:
        return cell, "-"
    return cell, f"{(plain.perplexity - row.perplexity) / (plain.perplexity - original):.0%}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="stories15m,smollm2")
    parser.add_argument("--methods", default=",".join((*INTEGER_METHODS, *FIXED_METHODS)))
    parser.add_argument("--bits", default="3,4")
    parser.add_argument("--asymmetric", action="store_true", help="with zero points")
    parser.add_argument("--quick", action="store_true", help="a quarter of the calibration and of the scored text")
    parser.add_argument("--device", default="auto", help="device that quantizes: auto, cpu or cuda")
    parser.add_argument("--cached", action="store_true", help="only print finished rows")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: all")
    parser.add_argument("--cache", type=Path, default=Path("build/quantization_order"))
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    arguments = parser.parse_args()
    for name in arguments.methods.split(","):
        if name not in (*INTEGER_METHODS, *FIXED_METHODS):
            parser.error(f"no method {name}; there are {', '.join((*INTEGER_METHODS, *FIXED_METHODS))}")
    return arguments


if __name__ == "__main__":
    main()
