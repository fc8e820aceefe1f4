"""What HTTP costs: serving throughput as a fraction of the offline engine's on the same work, in the same run.

    python benchmarks/serve_vs_offline.py smollm2 [--num-prompts 64] [--streams 16] [--repeat 3] [--json]

Both sides compute the same random prompts (same ids, same lengths, no end of text) with the same engine options; the
server process, the engine process and the load generator share the machine. Runs are interleaved (offline, served,
offline, ...) and medians compared, so that a noisy machine disturbs both alike. The prefix cache is off on both sides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.server_process import started_server
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.sources import resolve

_COMMAND = [sys.executable, "-m", "tokenmill", "bench"]


def main() -> None:
    options = _arguments()
    engine = ["--concurrency", str(options.streams), "--no-prefix-caching"]
    engine += ["--threads", str(options.threads)] if options.threads else []
    model = str(resolve(options.model).path)
    vocab_size = open_checkpoint(resolve(options.model).path).description.vocab_size
    offline: list[float] = []
    served: list[dict[str, Any]] = []
    for number in range(options.repeat):
        offline.append(_offline(model, options, engine))
        served.append(_served(model, vocab_size, options, engine))
        if not options.json:
            print(f"run {number + 1}: offline {offline[-1]:.1f}, served {served[-1]['output_throughput']:.1f} tok/s")
    rates = [each["output_throughput"] for each in served]
    result = {
        "model": options.model,
        "streams": options.streams,
        "num_prompts": options.num_prompts,
        "input_len": options.input_len,
        "output_len": options.output_len,
        "offline_tok_s": statistics.median(offline),
        "served_tok_s": statistics.median(rates),
        "fraction": statistics.median(rates) / statistics.median(offline),
        "fractions": [served_rate / offline_rate for offline_rate, served_rate in zip(offline, rates, strict=True)],
        "client_cpu_us_per_token": statistics.median(each["client_cpu_us_per_token"] for each in served),
    }
    print(json.dumps(result) if options.json else "\n".join(f"{name}: {value}" for name, value in result.items()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="threads of the engine; 0: its own choice")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _run(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([*_COMMAND, *arguments, "--json"], check=True, stdout=subprocess.PIPE)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _offline(model: str, options: argparse.Namespace, engine: list[str]) -> float:
    lengths = ["--input-len", str(options.input_len), "--output-len", str(options.output_len)]
    return float(
        _run("throughput", model, "--num-prompts", str(options.num_prompts), *lengths, *engine)["output_tok_s"]
    )


def _served(model: str, vocab_size: int, options: argparse.Namespace, engine: list[str]) -> dict[str, Any]:
    # The context of `bench throughput`: the engine then reserves the same KV memory on both sides.
    context = str(options.input_len + options.output_len)
    with started_server(model, "--context", context, *engine) as server:
        lengths = ["--random-input-len", str(options.input_len), "--random-output-len", str(options.output_len)]
        load = [
            "--num-prompts",
            str(options.num_prompts),
            "--max-concurrency",
            str(options.streams),
            "--num-warmups",
            "1",
        ]
        result = _run(
            "serve", "--base-url", server.url, *lengths, *load, "--ignore-eos", "--vocab-size", str(vocab_size)
        )
        assert result["failed"] == 0, result["failures"]
        return result


if __name__ == "__main__":
    main()
