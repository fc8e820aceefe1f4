"""Does the simulator predict this engine on this machine? Records a serving run and simulates the same load.

    tokenmill plan smollm2 --calibrate
    python benchmarks/simulate_vs_engine.py smollm2 [--seconds 300] [--load 0.6] [--json]

Requests of random lengths arrive by a Poisson process at `--load` of the rate that the simulator thinks possible;
server, engine and load generator share the machine, as they did in calibration.
The aim is a ratio within 15 % of 1 for throughput and P50 TTFT. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tokenmill.bench.serve_job import ServeJob
from tokenmill.calibrate.job import compare_runs
from tokenmill.calibrate.served_probe import measured, started_server
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.sources import resolve
from tokenmill.plan.simulate.job import SimulatedEngine, simulate_engine
from tokenmill.plan.simulate.measured import measured_engine
from tokenmill.plan.simulate.question import LoadQuestion, load_of


def main() -> None:
    options = _arguments()
    engine = measured_engine(options.model)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "load.jsonl"
        rate = options.load * _capacity(engine, options)
        rows = _rows(rate, options)
        trace.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        job = ServeJob(
            dataset_name="timed_trace",
            dataset_path=str(trace),
            num_prompts=len(rows),
            vocab_size=open_checkpoint(resolve(options.model).path).description.vocab_size,
            ignore_eos=True,
            num_warmups=1,
        )
        simulation = simulate_engine(engine, load_of(LoadQuestion(trace=str(trace))))
        with started_server(options.model) as url:
            measurement = measured(replace(job, base_url=url))
    result = {
        "model": options.model,
        "requests": len(rows),
        "requests_s": rate,
        "seconds": measurement.ended - measurement.began,
        "compared": compare_runs("run", simulation, measurement),
    }
    print(json.dumps(result) if options.json else _lines(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--load", type=float, default=0.6, help="share of what the simulator thinks possible")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _capacity(engine: SimulatedEngine, options: argparse.Namespace) -> float:
    """Requests per second when sixteen users always wait."""
    question = LoadQuestion(input_tokens=options.input_len, output_tokens=options.output_len, users=16, limit=160)
    return 160 / simulate_engine(engine, load_of(question)).duration_s


def _rows(rate: float, options: argparse.Namespace) -> list[dict[str, float]]:
    random = Random(options.seed)
    rows, seconds = [], 0.0
    while seconds < options.seconds:
        lengths = [max(1, round(random.uniform(0.5, 1.5) * mean)) for mean in (options.input_len, options.output_len)]
        rows.append({"timestamp": round(1e3 * seconds, 3), "input_length": lengths[0], "output_length": lengths[1]})
        seconds += random.expovariate(rate)
    return rows


def _lines(result: dict[str, Any]) -> str:
    head = (
        f"{result['model']}: {result['requests']} requests at {result['requests_s']:.2f}/s, {result['seconds']:.0f} s"
    )
    rows = [
        f"{row['what']}: predicted {row['predicted']:.1f}, measured {row['measured']:.1f}, ratio {row['ratio']:.2f}"
        for row in result["compared"]
    ]
    return "\n".join([head, *rows])


if __name__ == "__main__":
    main()
