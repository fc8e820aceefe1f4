"""Our quantizers beside the field's, on one model, one calibration text, the same bits, groups and symmetry.

    python benchmarks/quantizers.py --calibration calibration.txt --text eval.txt [--model stories15m] [--bits 4,3]
        [--groups 32] [--asymmetric] [--only auto-round,ours:autoround] [--venvs FOLDER] [--json FILE]
        [--device cuda] [--peer-packages FOLDER] [--limit SECONDS]

Each peer is installed by pip into an environment of its own under --venvs, once; one that cannot be installed or run is
listed with the reason. Where there is no network, --peer-packages names a folder of unpacked wheels instead: peers then
run in this Python with that folder before its own packages, and FOLDER/NAME, where there is one, before it (NAME as an
environment's: auto-round, llm-compressor). Call it site-packages: dill, which llm-compressor hashes its data with,
knows by that name what is installed. Every result is loaded by our engine and measured by one evaluator, on the CPU
whatever --device quantized on (--kernels ref: in float32 throughout): perplexity with the standard error of its
difference to the unquantized model, and the mean divergence. Seconds (of the wall, and of all cores together, which a
busy machine changes less) and peak memory are of the whole process that quantized, start and loading included. Prints a
table; --json keeps every row as soon as it is there; the output of a job that failed is kept in --out; what is there
already is only measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from importance_file import write_importance

from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.sources import resolve
from tokenmill.quantize.ggml.export import quantize_gguf
from tokenmill.quantize.gguf_job import GGUFJob

_PEERS = Path(__file__).parent / "peers"
_TORCH = ["torch", "transformers", "datasets", "safetensors"]
_LLAMACPP = ["llama-cpp-python", "gguf", "numpy"]
_COMPRESSOR = [*_TORCH, "llmcompressor"]
PACKAGES = {  # peer -> (environment, packages)
    "auto-round": ("auto-round", [*_TORCH, "auto-round"]),
    "hqq": ("hqq", [*_TORCH, "hqq"]),
    "torchao": ("torchao", [*_TORCH, "torchao"]),
    "llm-compressor-gptq": ("llm-compressor", _COMPRESSOR),
    "llm-compressor-awq": ("llm-compressor", _COMPRESSOR),
    "gptqmodel": ("gptqmodel", [*_TORCH, "gptqmodel"]),
    "llama.cpp": ("llama.cpp", _LLAMACPP),
}
OURS = (
    "rtn",
    "hqq",
    "awq",
    "gptq",
    "autoround",
    "autoround+short",
    "autoround+best",
    "gptq+scales",
    "gptq+mended",
    "gptq+fisher",
    "spinquant",
    "spinquant+drawn",
    "spinquant+fisher",
    "spinquant+long",
    "gptq+trained",
)
_METHODS = {"spinquant": "spinquant+gptq"}  # a row's name -> what --method is, where it is another
_DRAWN = 128
_FROM_GPTQ = ["--option", "start=gptq"]
_TUNING = {
    "trained": ["--calibration-drawn", "512", "--train-codes", "400"],
    "scales": ["--tune-scales", "50"],
    "drawn": ["--calibration-drawn", str(_DRAWN), "--tune-scales", "50"],
    "mended": ["--option", "metric=fisher"],
    "fisher": ["--option", "metric=fisher", "--calibration-drawn", str(_DRAWN), "--tune-scales", "80"],
    "long": ["--option", "metric=fisher", "--calibration-drawn", "512", "--tune-scales", "200"],
    "short": [*_FROM_GPTQ, "--option", "iterations=50"],
    "best": [
        *(*_FROM_GPTQ, "--option", "iterations=100", "--option", "metric=fisher"),
        *("--calibration-drawn", str(_DRAWN), "--tune-scales", "50"),
    ],
}
_SEES_TORCH = {"gptqmodel"}  # its build imports torch
_LONGEST_INSTALL = 360


@dataclass
class Row:
    who: str
    bits: int
    symmetric: bool
    device: str  # that quantized
    seconds: float = 0.0
    core_seconds: float = 0.0
    peak_bytes: int = 0
    bytes: int = 0
    perplexity: float = 0.0
    perplexity_error: float = 0.0  # of the difference to the unquantized model: both saw the same tokens
    divergence: float = 0.0
    skipped: str = ""


class Failed(Exception):
    """Why a peer has no row, in one line."""


Cost = tuple[float, float, int]  # seconds, of all cores together, peak memory


def run(command: list[str], variables: Mapping[str, str], log: Path, limit: int) -> Cost:
    """What a process cost; its last words where it fails or takes longer than `limit` seconds, and all in `log`."""
    started = time.monotonic()
    command = ["timeout", "--kill-after", "5", str(limit), *command]
    with log.open("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **variables})
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        words = [line.strip() for line in output.read().splitlines() if line.strip()]
    seconds = time.monotonic() - started
    if process.returncode and seconds >= limit:
        raise Failed(f"ended after {limit} s")
    if process.returncode:
        raise Failed(words[-1][-200:] if words else f"exit code {process.returncode}")
    log.unlink()
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def environment(peer: str, venvs: Path, torch: str) -> str:
    """The Python of the peer's environment, made on first use."""
    name, packages = PACKAGES[peer]
    folder = venvs / name
    python, mark = folder / "bin" / "python", folder / "installed"
    if not mark.exists():
        venvs.mkdir(parents=True, exist_ok=True)

        def install(*words: str) -> None:
            run([sys.executable if words[0] == "venv" else str(python), "-m", *words], {}, log, _LONGEST_INSTALL)

        log = venvs / f"{name}.log"
        try:
            install("venv", "--clear", str(folder))
            wanted = [torch if package == "torch" else package for package in packages]
            pip = ["pip", "install", "-q"]
            if name in _SEES_TORCH:
                install(*pip, "setuptools", "wheel", torch)
                pip.append("--no-build-isolation")
            install(*pip, *wanted)
        except Failed as reason:
            raise Failed(f"cannot be installed: {reason}") from None
        mark.touch()
    return str(python)


def peer_path(peer: str, packages: Path) -> str:
    """PYTHONPATH of a peer whose wheels were unpacked into `packages`: its own folder first, ours last."""
    folders = [packages / PACKAGES[peer][0], packages]
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*(str(each.resolve()) for each in folders if each.is_dir()), *filter(None, [inherited])])


class Harness:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._model = resolve(arguments.model).path
        arguments.out.mkdir(parents=True, exist_ok=True)

    def row(self, who: str, bits: int) -> Row:
        symmetric = not self._arguments.asymmetric
        row = Row(who, bits, symmetric, self._arguments.device)
        kind = "sym" if symmetric else "asym"
        out = self._arguments.out / f"{who.replace(':', '-').replace('+', '-')}-{bits}-{kind}"
        try:
            cost = out.parent / f"{out.name}.json"  # written last: without it the files are not whole
            if not cost.exists():
                cost.write_text(json.dumps(self._make(who, bits, out)))
            row.seconds, row.core_seconds, row.peak_bytes = json.loads(cost.read_text())
            self._measure(row, out if out.exists() else _gguf(out))
        except Failed as reason:
            row.skipped = str(reason)
        return row

    def _make(self, who: str, bits: int, out: Path) -> Cost:
        a = self._arguments
        log = out.with_name(f"{out.name}.log")
        if who.startswith("ours:"):
            return run(self._ours(who.removeprefix("ours:"), bits, out), {}, log, a.limit)
        variables = {"OMP_NUM_THREADS": str(a.threads)} if a.threads else {}
        variables |= {"CUDA_VISIBLE_DEVICES": ""} if a.device == "cpu" else {}  # some take a GPU unasked
        if a.peer_packages:
            python, variables["PYTHONPATH"] = sys.executable, peer_path(who, a.peer_packages)
        else:
            python = environment(who, a.venvs, a.torch)
        if who == "llama.cpp":
            return run(self._llamacpp(python, bits, _gguf(out)), variables, log, a.limit)
        words = ["--text", a.calibration, "--bits", bits, "--group", a.groups, "--samples", a.samples]
        words += ["--length", a.length, "--device", a.device, *(["--asymmetric"] if a.asymmetric else [])]
        script = str(_PEERS / "quantizer_peers.py")
        return run([python, script, who, str(self._model), str(out), *map(str, words)], variables, log, a.limit)

    def _ours(self, method: str, bits: int, out: Path) -> list[str]:
        a = self._arguments
        name, _, tuned = method.partition("+")
        command = [sys.executable, "-m", "tokenmill", "quantize", str(self._model), "--out", out]
        command += ["--method", _METHODS.get(name, name)]
        command += ["--bits", bits, "--group-size", a.groups, "--asymmetric" if a.asymmetric else "--symmetric"]
        command += ["--calibration", a.calibration, "--calibration-samples", a.samples]
        command += ["--calibration-length", a.length, "--no-gate", "--device", a.device]
        command += ["--threads", a.threads, *_TUNING.get(tuned, [])]
        command += ["--option", f"pool={a.samples + _DRAWN}"] if tuned == "best" else []  # steps see all sequences
        return [str(word) for word in command]

    def _llamacpp(self, python: str, bits: int, out: Path) -> list[str]:
        """Groups of 32 with and without an offset; its other types have other groups."""
        kind = {(4, False): "Q4_0", (4, True): "Q4_1"}.get((bits, self._arguments.asymmetric))
        if kind is None or self._arguments.groups != 32:
            raise Failed("has no type of these bits, groups and symmetry")
        a = self._arguments
        floats, imatrix = a.out / "floats.gguf", a.out / "imatrix.gguf"
        if not imatrix.exists():
            quantize_gguf(open_checkpoint(self._model), floats, "F32")
            job = GGUFJob(
                str(floats),
                out,
                "imatrix",
                calibration=a.calibration,
                calibration_samples=a.samples,
                calibration_length=a.length,
            )
            write_importance(floats, job, imatrix)
        words = ["quantize", str(floats), str(out), kind, "--imatrix", str(imatrix)]
        return [python, str(_PEERS / "llamacpp_quality.py"), *words]

    def _measure(self, row: Row, path: Path) -> None:
        a = self._arguments
        words = [sys.executable, "-m", "tokenmill", "eval", "divergence", str(path), "--reference", str(self._model)]
        words += ["--text", str(a.text), "--context", str(a.length), "--json", "--device", "cpu"]
        words += ["--threads", str(a.threads)] if a.threads else []
        words += ["--kernels", a.kernels] if a.kernels else []
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=a.limit)
        except subprocess.TimeoutExpired:
            raise Failed(f"measuring was ended after {a.limit} s") from None
        if done.returncode:
            raise Failed(f"our engine: {done.stderr.strip().splitlines()[-1]}")
        found = json.loads(done.stdout)
        row.perplexity, row.divergence = found["perplexity"], found["kld_mean"]
        row.perplexity_error = found["perplexity_ratio_stderr"] * found["reference_perplexity"]
        files = [path] if path.is_file() else list(path.glob("*.safetensors"))
        row.bytes = sum(file.stat().st_size for file in files)


def _gguf(out: Path) -> Path:
    return out.with_name(f"{out.name}.gguf")  # names have dots


def show(row: Row) -> str:
    kind = f"{row.bits} bits, {'symmetric' if row.symmetric else 'asymmetric'}"
    if row.skipped:
        return f"| {row.who} | {kind} | skipped: {row.skipped} | | | | | |"
    numbers = [
        f"{row.perplexity:.4f} ± {row.perplexity_error:.3f}",
        f"{row.divergence:.5f}",
        f"{row.seconds:.0f}",
        f"{row.core_seconds:.0f}",
        f"{row.peak_bytes / 1e6:.0f}",
    ]
    return f"| {row.who} | {kind} | {' | '.join(numbers)} | {row.bytes / 1e6:.1f} |"


def read_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="stories15m")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--bits", default="4", help="comma-separated")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--asymmetric", action="store_true")
    parser.add_argument("--samples", type=int, default=47)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--only", default="", help="rows, comma-separated (default: all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="that ours and the peers quantize on")
    parser.add_argument("--kernels", default="", help="of the evaluator, such as ref: float activations for every file")
    parser.add_argument("--venvs", type=Path, default=Path("quantizer-venvs"))
    parser.add_argument("--peer-packages", type=Path, help="unpacked wheels of the peers: nothing is installed")
    parser.add_argument("--torch", default="torch", help="what pip installs as torch, such as 'torch<2.14'")
    parser.add_argument("--threads", type=int, default=0, help="of every job; 0: all cores")
    parser.add_argument("--limit", type=int, default=3600, help="seconds after which a job is ended")
    parser.add_argument("--out", type=Path, default=Path("quantizer-files"))
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


def main() -> None:
    arguments = read_arguments()
    everyone = [*(f"ours:{name}" for name in OURS), *PACKAGES]
    chosen = arguments.only.split(",") if arguments.only else everyone
    harness, rows = Harness(arguments), []
    print("| | | perplexity | divergence | seconds | of all cores | peak MB | file MB |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for bits in map(int, arguments.bits.split(",")):
        for who in chosen:
            rows.append(harness.row(who, bits))
            print(show(rows[-1]), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
