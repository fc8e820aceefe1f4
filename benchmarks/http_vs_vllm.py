"""tokenmill's server and vLLM's on one GPU under the same load over HTTP: one model's shape, random weights.

    python benchmarks/http_vs_vllm.py [--config FILE] [--variants bf16,fp8] [--concurrency 4,16,64,256]
        [--input-len 300] [--output-len 128] [--engines vllm,tokenmill] [--vllm-packages FOLDER] [--out FILE]

Shapes and dtypes as in gpu_vs_vllm.py; words that stand for token ids make a tokenizer, so that both detokenize. The
servers run one after the other (both would not fit a GPU); each is asked by `tokenmill bench serve` with
`--max-concurrency` requests in flight, three rounds of them, prompts of token ids that it never had before, greedy, no
end of text. A line of JSON for each as it is measured: output tokens per second, medians of TTFT and of the time
between tokens; a table with ratios at the end. Ours is asked once it has captured what it captures in idle moments;
vLLM captures before it is ready.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu_vs_vllm import CONFIG, VARIANTS, VLLM_OPTIONS, write_model
from benchmarks.http_cost import wait_quiet
from benchmarks.server_process import started_server

CONTEXT = "4096"
START_SECONDS = 240.0
FIGURES = {"output_throughput": "tok_s", "median_ttft_ms": "ttft_ms", "median_tpot_ms": "tpot_ms"}

Row = dict[str, Any]


def write_words(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"Ġw{number}": number for number in range(vocab_size)}, unk_token="Ġw0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


@contextlib.contextmanager
def vllm_server(model: Path, variant: str, python: str, packages: Path | None) -> Iterator[str]:
    """Its address, once it is healthy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [str(packages)] if packages is not None else []
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # greedy needs no sampler, and compiling it takes two minutes
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--load-format", "dummy"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", CONTEXT, "--max-num-seqs", "256"]
    command += VLLM_OPTIONS[variant]
    with subprocess.Popen(command, env=environment, stdout=sys.stderr) as process:
        try:
            url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
            while not _is_healthy(url):
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit("vLLM's server did not start; its log is above")
                time.sleep(0.25)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def our_server(model: Path, variant: str, options: argparse.Namespace) -> Iterator[str]:
    flags = ["--load-format", "dummy", "--device", "cuda", "--context", CONTEXT, "--concurrency", "256"]
    for name, value in VARIANTS[variant].items():
        flags += [f"--{name.replace('_', '-')}", value]
    with started_server(str(model), *flags) as server:
        address = urlsplit(server.url)
        ask(server.url, 2, 4, options, seed=99)
        wait_quiet((str(address.hostname), int(address.port or 80)))
        yield server.url


def ask(url: str, concurrency: int, requests: int, options: argparse.Namespace, seed: int) -> dict[str, float]:
    command = [sys.executable, "-m", "tokenmill", "bench", "serve", "--base-url", url, "--json", "--ignore-eos"]
    command += ["--num-prompts", str(requests), "--max-concurrency", str(concurrency), "--seed", str(seed)]
    command += ["--random-input-len", str(options.input_len), "--random-output-len", str(options.output_len)]
    command += ["--vocab-size", str(options.vocabulary)]
    result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert result["failed"] == 0, result
    return {short: round(float(result[name]), 3) for name, short in FIGURES.items()}


def measure(engine: str, variant: str, model: Path, options: argparse.Namespace) -> Iterator[Row]:
    if engine == "vllm":
        server = vllm_server(model, variant, options.vllm_python, options.vllm_packages)
    else:
        server = our_server(model, variant, options)
    with server as url:
        for number, concurrency in enumerate(map(int, options.concurrency.split(","))):
            ask(url, concurrency, concurrency, options, seed=100 + number)  # warm: kernels, connections
            found = ask(url, concurrency, 3 * max(4, concurrency), options, seed=number)
            yield {"engine": engine, "variant": variant, "concurrency": concurrency} | found


def table(rows: list[Row]) -> str:
    lines = ["| | concurrency | vLLM, tok/s | tokenmill, tok/s | ratio | TTFT, ms | between tokens, ms |"]
    lines.append("|---|---|---|---|---|---|---|")
    by_case: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        by_case.setdefault((row["variant"], row["concurrency"]), {})[row["engine"]] = row
    for (variant, concurrency), engines in by_case.items():
        both = [engines.get(name, {}) for name in ("vllm", "tokenmill")]
        ratio = f"{both[1]['tok_s'] / both[0]['tok_s']:.2f}" if all(both) else "-"
        speeds = " | ".join(f"{each['tok_s']:.0f}" if each else "-" for each in both)
        times = " | ".join(
            " -> ".join(f"{each[name]:.2f}" if each else "-" for each in both) for name in ("ttft_ms", "tpot_ms")
        )
        lines.append(f"| {variant} | {concurrency} | {speeds} | {ratio} | {times} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, help="config.json of the shape (default: Llama-3.1-8B's)")
    parser.add_argument("--variants", default="bf16,fp8")
    parser.add_argument("--concurrency", default="4,16,64,256")
    parser.add_argument("--input-len", type=int, default=300)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--engines", default="vllm,tokenmill")
    parser.add_argument("--vllm-python", default=sys.executable, help="the Python that has vLLM (default: this one)")
    parser.add_argument("--vllm-packages", type=Path, help="folder with vLLM, put on its PYTHONPATH")
    parser.add_argument("--out", type=Path, help="file that figures are appended to as they are measured")
    options = parser.parse_args()
    config = CONFIG if options.config is None else json.loads(options.config.read_text())
    options.vocabulary = min(100000, config["vocab_size"])
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", config)
        write_words(model, config["vocab_size"])
        for variant in options.variants.split(","):
            for engine in options.engines.split(","):
                try:
                    for row in measure(engine, variant, model, options):
                        rows.append(row)
                        print(json.dumps(row), flush=True)
                        if options.out is not None:
                            with options.out.open("a") as file:
                                file.write(json.dumps(row) + "\n")
                except (SystemExit, subprocess.CalledProcessError, AssertionError) as problem:
                    print(f"{engine} {variant}: {problem}", file=sys.stderr)
    print(table(rows))


if __name__ == "__main__":
    main()
