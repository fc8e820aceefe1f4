"""The order of quantization methods: the perplexity of each on two small models, and how much of what plain rounding
loses each one wins back.

    python bench/quantization_order.py [--models stories15m,smollm2] [--methods gptq,awq] [--bits 3,4] [--quick]

Integer methods share one scheme per model (groups of 32 for stories15m, whose width is 288, of 64 for smollm2; no zero
points unless --asymmetric) and one calibration text, which is not the text that is scored. Scoring is llama.cpp's
protocol with float activations (the `ref` kernels) except where the scheme rounds them itself. A finished row is kept
under --cache and not computed again; --quick calibrates and scores on a quarter. Takes hours for smollm2 on two cores.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import asdict, dataclass
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


SUBJECTS = {
    "stories15m": Subject(32, "stories15m-samples.eval.txt", 256, "stories15m-samples.calibration.txt", 40),
    "smollm2": Subject(64, "wikitext2-raw.test.first-half.txt", 512, "wikitext2-tokens.valid.txt", 32),
}
INTEGER_METHODS = ("rtn", "awq", "gptq", "autoround", "awq+gptq", "rotation", "rotation+gptq", "hqq", "mixed")
FIXED_METHODS = {"smoothquant": 8, "fp8": 8, "nf4": 4}  # which bits each has
ASYMMETRIC = ("hqq",)  # whatever is asked


def main() -> None:
    arguments = parse_arguments()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    for model in arguments.models.split(","):
        rows = [measure(arguments, model, "float", 32)]
        for bits in map(int, arguments.bits.split(",")):
            wanted = [name for name in arguments.methods.split(",") if name in INTEGER_METHODS]
            rows += [measure(arguments, model, method, bits) for method in wanted]
        fixed = [name for name in arguments.methods.split(",") if name in FIXED_METHODS]
        rows += [measure(arguments, model, method, FIXED_METHODS[method]) for method in fixed]
        print_table(model, rows)


def measure(arguments: argparse.Namespace, model: str, method: str, bits: int) -> Row:
    """From the cache, or by a job and its perplexity."""
    kind = "-".join([model, method, str(bits), "asym" if arguments.asymmetric else "sym"])
    path = arguments.cache / (f"quick-{kind}.json" if arguments.quick else f"{kind}.json")
    if path.exists():
        return Row(**json.loads(path.read_text()))
    print(f"{kind} ...", file=sys.stderr, flush=True)
    subject, folder = SUBJECTS[model], arguments.cache / f"{path.stem}.model"
    target, num_bytes, seconds = model, 0, 0.0
    if method != "float":
        done = folder.with_suffix(".report")  # a job that was killed goes on by itself; a finished one is only scored
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            report = run_job(prepare(make_job(arguments, model, method, bits, folder)))
            done.write_text(json.dumps([weight_bytes(report.layers), report.seconds]))
        num_bytes, seconds = json.loads(done.read_text())
        target = str(folder)
    share = 4 if arguments.quick else 1
    job = TextJob(arguments.shared / "data/text" / subject.text, subject.context, subject.limit_bytes // share)
    scored = measure_perplexity(target, EngineConfig(kernels="ref", threads=arguments.threads), job)
    row = Row(model, method, bits, scored.perplexity, scored.stderr, num_bytes, round(seconds, 1))
    path.write_text(json.dumps(asdict(row)))
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_suffix(".report").unlink(missing_ok=True)
    return row


def make_job(arguments: argparse.Namespace, model: str, method: str, bits: int, out: Path) -> QuantizeJob:
    subject = SUBJECTS[model]
    request = RecipeRequest(method)
    if method in INTEGER_METHODS:
        symmetric = None if method in ASYMMETRIC else not arguments.asymmetric
        request = RecipeRequest(method, bits, subject.group_size, symmetric)
    elif method == "nf4":
        request = RecipeRequest(method, group_size=subject.group_size)
    return QuantizeJob(
        model=model,
        out=out,
        recipe=request,
        dtype="float32",
        calibration=arguments.shared / "data/text" / subject.calibration,
        calibration_samples=subject.samples // (4 if arguments.quick else 1),
        calibration_length=subject.context,
        threads=arguments.threads,
        gate=GateRequest(enabled=False),
    )


def weight_bytes(layers: list[dict[str, object]]) -> int:
    return sum(int(str(layer["num_bytes"])) for layer in layers)


def print_table(model: str, rows: list[Row]) -> None:
    """Markdown; "won back" is the share of the loss of plain rounding at the same bits that a method avoids."""
    original = rows[0].perplexity
    plain = {row.bits: row.perplexity for row in rows if row.method == "rtn"}
    print(f"\n{model} (float {original:.4f} +/- {rows[0].stderr:.2f})\n")
    print("| bits | method | perplexity | loss | won back | bytes of the linears | seconds |")
    print("|---|---|---|---|---|---|---|")
    for row in rows[1:]:
        loss = row.perplexity / original - 1
        won = "-"
        if row.bits in plain and row.method != "rtn" and plain[row.bits] > original:
            won = f"{(plain[row.bits] - row.perplexity) / (plain[row.bits] - original):.0%}"
        cells = (
            row.bits,
            row.method,
            f"{row.perplexity:.4f}",
            f"{loss:+.2%}",
            won,
            f"{row.bytes:,}",
            round(row.seconds),
        )
        print(f"| {' | '.join(map(str, cells))} |")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="stories15m,smollm2")
    parser.add_argument("--methods", default=",".join((*INTEGER_METHODS, *FIXED_METHODS)))
    parser.add_argument("--bits", default="3,4")
    parser.add_argument("--asymmetric", action="store_true", help="with zero points")
    parser.add_argument("--quick", action="store_true", help="a quarter of the calibration and of the scored text")
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
