"""Measures a server under Poisson arrivals at several rates and adds the runs to the planner's table.

    python benchmarks/poisson_runs.py smollm2 --known-as smollm2-135m --rates 0.5,1,2        # our engine, this machine
    python benchmarks/poisson_runs.py smollm2 --known-as smollm2-135m --rates 0.5,1,2 --engine llama.cpp
    python benchmarks/poisson_runs.py --shape 8b --device h200-sxm --rates 4,16,32 -- --device cuda
    python benchmarks/poisson_runs.py MODEL --engine vllm --url http://host:8000 --device h100-sxm --rates 4,16

Rows go to tokenmill/plan/validate/data/poisson_runs.csv (`--table`). Without --device the machine is calibrated first
and the record is stored beside the table. Then: python -m tokenmill.plan.validate FILE --write. Use an idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.server_process import started_server
from tokenmill import __version__
from tokenmill.bench.serve import measure_serving
from tokenmill.bench.serve_job import ServeJob
from tokenmill.bench.serve_report import build_report
from tokenmill.checkpoint.sources import resolve
from tokenmill.deploy.engines.base import Launch
from tokenmill.optimize.rivals.llamacpp import LlamaCppRival
from tokenmill.optimize.rivals.process import RunningServer
from tokenmill.plan.question.model_names import describe_for_planning
from tokenmill.plan.validate.poisson_runs import COLUMNS, runs_path

PORT = 8177
SLOTS = 8


def main() -> None:
    options = _arguments()
    table = options.table or runs_path()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if options.shape:
            from benchmarks.gpu_vs_vllm import write_model

            model = str(write_model(Path(folder) / "shape"))
            options.flags += ["--load-format", "dummy"]
        calibration = "" if options.device else _calibrated(options.model, table.parent)
        with _server(options, model) as (url, version):
            _measure(options, url, 0.0, 4)  # warm up
            rows = [_row(options, version, calibration, url, rate) for rate in options.rates]
    _append(table, rows)


def _row(options: argparse.Namespace, version: str, calibration: str, url: str, rate: float) -> dict[str, Any]:
    report = _measure(options, url, rate, max(12, round(rate * options.seconds)))
    mean_s = (report["mean_e2el_ms"] or 0.0) / 1e3
    print(
        f"rate {rate:g}: {report['output_throughput']:.1f} tok/s, TTFT P50 {report['median_ttft_ms']:.0f} ms",
        flush=True,
    )
    return {
        "engine": options.engine,
        "engine_version": version,
        "device": options.device or "this-machine",
        "calibration": calibration,
        "model": "llama-3.1-8b" if options.shape else options.known_as or options.model,
        "dtype": options.dtype or describe_for_planning(options.model).stored_format,
        "rate": rate,
        "input_tokens": options.input_len,
        "output_tokens": options.output_len,
        "concurrency": round(report["request_throughput"] * mean_s, 2),  # Little's law
        "output_tok_s": round(report["output_throughput"], 2),
        "ttft_p50_ms": round(report["median_ttft_ms"], 2),
        "ttft_p95_ms": round(report["p95_ttft_ms"], 2),
        "itl_p50_ms": round(report["median_tpot_ms"], 3),
        "itl_p95_ms": round(report["p95_tpot_ms"], 3),
        "date": date.today().isoformat(),
        "command": "python benchmarks/poisson_runs.py " + shlex.join(sys.argv[1:]),
    }


def _measure(options: argparse.Namespace, url: str, rate: float, requests: int) -> dict[str, Any]:
    job = ServeJob.from_options(
        {
            "base_url": url,
            "num_prompts": requests,
            "random_input_len": options.input_len,
            "random_output_len": options.output_len,
            "request_rate": rate or float("inf"),
            "metric_percentiles": "95",
            "percentile_metrics": "ttft,tpot,e2el",
            "seed": round(1000 * rate),
            "ignore_eos": True,
        }
    )
    report = build_report(measure_serving(job))
    if report["failed"]:
        raise SystemExit(f"{report['failed']} requests failed: {report['failures']}")
    return report


@contextlib.contextmanager
def _server(options: argparse.Namespace, model: str) -> Iterator[tuple[str, str]]:
    if options.url:
        yield options.url, options.engine_version or "unknown"
    elif options.engine == "tokenmill":
        with started_server(model, *options.flags) as server:
            yield server.url, __version__
    elif options.engine == "llama.cpp":
        rival = LlamaCppRival()
        with _llama_server(rival, model, options.flags) as server:
            yield server.url, rival.version()
    else:
        raise SystemExit(f"start {options.engine} yourself and give --url")


def _llama_server(rival: LlamaCppRival, model: str, flags: list[str]) -> RunningServer:
    """As its users start it: a slot for each of eight requests, the rest as it chooses."""
    if rival.missing():
        raise SystemExit(rival.missing())
    context = str(SLOTS * 1024)
    command = ["llama-server", "--model", str(resolve(model)), "--parallel", str(SLOTS), "--ctx-size", context, *flags]
    return RunningServer(rival.localized(Launch(tuple(command)), PORT), f"http://127.0.0.1:{PORT}")


def _calibrated(model: str, folder: Path) -> str:
    """The calibration of this machine, stored beside the table; taken now where there is none."""
    from tokenmill.calibrate.job import calibrate
    from tokenmill.plan.cost.this_machine import calibration_path, load_calibration, save_calibration

    found = load_calibration()
    if found is None or model not in found.models:
        calibrate(model)
    source = calibration_path()
    calibration = load_calibration()
    assert calibration is not None
    name = f"machine-{source.stem[:8]}.json"  # with the shares as they are now: the files may not be there later
    save_calibration(replace(calibration, models={}, shares=calibration.device().measured_shares), folder / name)
    return name


def _append(table: Path, rows: list[dict[str, Any]]) -> None:
    is_new = not table.exists()
    with table.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(epilog="After --: flags of the server.")
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--shape", choices=("8b",))
    parser.add_argument("--engine", default="tokenmill")
    parser.add_argument("--engine-version", default="")
    parser.add_argument("--url", default="")
    parser.add_argument("--device", default="", help="name in the catalog; default: this machine, calibrated")
    parser.add_argument("--dtype", default="", help="weight format; default: the file's own")
    parser.add_argument("--known-as", default="", help="built-in name of the model for the planner")
    parser.add_argument("--rates", type=lambda text: [float(part) for part in text.split(",")], default=[0.5, 1.0, 2.0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--table", type=Path)
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    return parser.parse_args(sys.argv[1:end], argparse.Namespace(flags=sys.argv[end + 1 :]))


if __name__ == "__main__":
    main()
