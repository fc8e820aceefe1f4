"""How far is a simulated server from the real one near saturation? Calibrated on one load, tested on others.

    python benchmarks/twin_accuracy.py [stories15m smollm2] [--loads 0.8 0.9 0.95] [--seconds 90] [--json]

Starts `tokenmill serve --traffic-log`, finds the rate at which it saturates (a closed loop of many users), then offers
Poisson arrivals of mixed lengths, some with shared prefixes: first at --calibrate-load, whose logged steps the cost
model is fitted to, then at each of --loads, whose logs are simulated with that cost model. The aim: throughput within
5 %, TTFT p50 within 15 % and p95 within 25 %. Server and load generator share the machine: run it on an idle one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tokenmill.bench.serve_job import ServeJob
from tokenmill.calibrate.served_probe import measured, started_server
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.sources import resolve
from tokenmill.optimize.objectives import Objectives
from tokenmill.optimize.replay import Arrivals, replay
from tokenmill.plan.simulate.twin import Twin, figures, make_twin

_LIMITS = {"throughput_tok_s": 0.05, "ttft_ms_p50": 0.15, "ttft_ms_p95": 0.25}
_PREFIX_TOKENS, _NUM_PREFIXES, _SHARED = 64, 4, 0.3  # of the requests, a third begins with one of four prefixes
_SATURATING_USERS = 48


@dataclass(frozen=True)
class Row:
    model: str
    load: float
    requests: int
    requests_s: float
    cache_hit_rate: float
    measured: dict[str, float]
    simulated: dict[str, float]
    error: dict[str, float]

    @property
    def within(self) -> bool:
        return all(abs(self.error[name]) <= limit for name, limit in _LIMITS.items())


def main() -> None:
    options = _arguments()
    rows = []
    for model in options.models:
        rows += list(_of_model(model, options))
    if options.json:
        print(json.dumps({"limits": _LIMITS, "rows": [asdict(row) | {"within": row.within} for row in rows]}))
    else:
        print(_table(rows))
    if options.check and not all(row.within for row in rows):
        raise SystemExit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["stories15m", "smollm2"])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.8, 0.9, 0.95])
    parser.add_argument("--calibrate-load", type=float, default=0.7)
    parser.add_argument("--seconds", type=float, default=90.0, help="of each load")
    parser.add_argument("--input-len", type=int, default=96)
    parser.add_argument("--output-len", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep the logs in this folder")
    parser.add_argument("--check", action="store_true", help="fail where a limit is missed")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _of_model(model: str, options: argparse.Namespace) -> Iterator[Row]:
    vocabulary = open_checkpoint(resolve(model).path).description.vocab_size
    with _folder(options.keep) as folder:
        capacity = _capacity(model, vocabulary, options)
        print(f"{model}: saturates at {capacity:.2f} requests/s", file=sys.stderr)
        calibrated: Twin | None = None
        for number, load in enumerate([options.calibrate_load, *options.loads]):
            log = folder / f"{Path(model).name}-{number}-{load:g}"
            _serve(model, log, _arrivals(load * capacity, vocabulary, options, seed=options.seed + number))
            twin = make_twin(log, calibrated)
            row = _row(model, load, twin)
            calibrated = calibrated or twin
            print(_line(row) + ("  (calibration)" if calibrated is twin else ""), file=sys.stderr)
            if calibrated is not twin:
                yield row


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _lengths(random: Random, options: argparse.Namespace) -> tuple[int, int]:
    """Prompts spread over a factor of eight, answers over a factor of four, around the means."""
    prompt = options.input_len * 2 ** random.uniform(-1.5, 1.0)
    return max(8, round(prompt)), max(2, round(options.output_len * 2 ** random.uniform(-1.0, 0.8)))


def _capacity(model: str, vocabulary: int, options: argparse.Namespace) -> float:
    """Requests per second of a closed loop of many users, after a first round that warms up."""
    random = Random(f"{options.seed}/capacity")
    count = _SATURATING_USERS * 6
    with tempfile.TemporaryDirectory() as folder, started_server(model) as url:
        trace = Path(folder) / "lengths.jsonl"
        rows = [_lengths(random, options) for _ in range(count)]
        lines = [{"timestamp": 0, "input_length": prompt, "output_length": output} for prompt, output in rows]
        trace.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        job = ServeJob(
            dataset_name="timed_trace",
            dataset_path=str(trace),
            num_prompts=count,
            max_concurrency=_SATURATING_USERS,
            vocab_size=vocabulary,
            ignore_eos=True,
            num_warmups=2,
            base_url=url,
        )
        run = measured(job)
    ends = sorted(sample.ended for sample in run.samples)
    first, last = _SATURATING_USERS, count - _SATURATING_USERS  # neither the start nor the drain
    return (last - first) / (ends[last] - ends[first])


def _arrivals(rate: float, vocabulary: int, options: argparse.Namespace, seed: int) -> Arrivals:
    random = Random(f"{seed}/arrivals")
    shared = Random("prefixes")  # the same at each load
    prefixes = [[shared.randrange(3, vocabulary) for _ in range(_PREFIX_TOKENS)] for _ in range(_NUM_PREFIXES)]
    times, prompts, outputs, now = [], [], [], 0.0
    while now < options.seconds:
        length, output = _lengths(random, options)
        start = random.choice(prefixes) if random.random() < _SHARED else []
        own = [random.randrange(3, vocabulary) for _ in range(max(8, length - len(start)))]
        times.append(now)
        prompts.append([*start, *own])
        outputs.append(output)
        now += random.expovariate(rate)
    return Arrivals(tuple(times), tuple(prompts), tuple(outputs), f"{rate:.2f} requests/s")


def _serve(model: str, log: Path, arrivals: Arrivals) -> None:
    with started_server(model, "--traffic-log", str(log)) as url:
        replay(url, arrivals, Objectives(()), model="", time_limit_s=4 * arrivals.times_s[-1] + 120)


def _row(model: str, load: float, twin: Twin) -> Row:
    seen, predicted = figures(twin.measured), figures(twin.simulated)
    span = twin.measured[-1].arrival_ms / 1e3
    return Row(
        model,
        load,
        len(twin.measured),
        len(twin.measured) / max(1e-3, span),
        seen["cache_hit_rate"],
        _flat(seen),
        _flat(predicted),
        {name: _flat(predicted)[name] / _flat(seen)[name] - 1 for name in _LIMITS},
    )


def _flat(found: dict[str, Any]) -> dict[str, float]:
    ttft = found["ttft_ms"]
    return {
        "throughput_tok_s": found["throughput_tok_s"],
        "ttft_ms_p50": ttft["p50"],
        "ttft_ms_p95": ttft["p95"],
        "tpot_ms_p50": found["tpot_ms"]["p50"],
    }


def _line(row: Row) -> str:
    parts = [f"{row.model} at {row.load:.0%} ({row.requests_s:.1f}/s, {row.requests} requests)"]
    parts += [
        f"{name} {row.measured[name]:.1f} measured, {row.simulated[name]:.1f} simulated ({row.error[name]:+.1%})"
        for name in _LIMITS
    ]
    return ", ".join(parts)


def _table(rows: list[Row]) -> str:
    head = "| model | load | requests/s | output tok/s | error | TTFT p50 ms | error | TTFT p95 ms | error | within |\n"
    lines = [head + "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|"]
    for row in rows:
        cells = [row.model, f"{row.load:.0%}", f"{row.requests_s:.1f}"]
        for name in _LIMITS:
            cells += [f"{row.measured[name]:.1f}", f"{row.error[name]:+.1%}"]
        lines.append(f"| {' | '.join(cells)} | {'yes' if row.within else 'no'} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
