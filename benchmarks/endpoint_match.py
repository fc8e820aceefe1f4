"""Does `tokenmill eval endpoint` know what is served? Six files of one model behind two servers, and what it says.

    python benchmarks/endpoint_match.py [--model stories15m] [--files F16,Q4_0] [--all]

Each file is served by `tokenmill serve` and by llama.cpp's server (as optimize/rivals starts it: llama-server,
xllamacpp or llama-cpp-python) and matched against roundings of the model: the six, or with --all every known one and
the KV dtypes. A row: the file, the verdict with its confidence, and the divergence beside that of the file itself.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.sources import resolve
from tokenmill.config import EngineConfig
from tokenmill.evaluate.endpoint import EndpointClient
from tokenmill.evaluate.endpoint_probe import ProbePlan
from tokenmill.evaluate.endpoint_report import KV_DTYPES, WEIGHTS, EndpointJob, EndpointReport, measure_endpoint
from tokenmill.optimize.local_server import LocalServer
from tokenmill.optimize.rivals.base import RivalWorkload
from tokenmill.optimize.rivals.llamacpp import LlamaCppRival
from tokenmill.quantize.calibration_text import built_in_held_out
from tokenmill.quantize.roundings import RoundingFiles

FILES = ("F16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0")


def main() -> None:
    parser = argparse.ArgumentParser(description="What `eval endpoint` says of six known files behind two servers.")
    parser.add_argument("--model", default="stories15m")
    parser.add_argument("--all", action="store_true", help="match against every known rounding and KV dtype")
    parser.add_argument("--files", default=",".join(FILES), help="serve only these of the six")
    arguments = parser.parse_args()
    source = resolve(arguments.model).path
    files = RoundingFiles(source)
    names, kv = (WEIGHTS, KV_DTYPES) if arguments.all else (FILES, ())
    job = EndpointJob(source, built_in_held_out(), ProbePlan(passages=16, length=64, positions=320), names, kv)
    context = min(1024, open_checkpoint(source).description.context_length)
    rival = LlamaCppRival()
    engines = ["tokenmill", *(() if rival.missing() else (f"llama.cpp ({rival.version()})",))]
    print(f"{'file':8} {'engine':36} {'most like':18} {'sure':>7} {'method':10} {'KLD':>9} {'file KLD':>9}")
    right = total = 0
    for name in arguments.files.split(","):
        for number, engine in enumerate(engines):
            path = files.find(name)
            server = rival.start(path, RivalWorkload(context, 1)) if number else LocalServer(path, EngineConfig())
            with server, EndpointClient(server.url, server.model) as client:
                report = measure_endpoint(client, job, EngineConfig(), files.find)
            print(f"{name:8} {engine:36} {_row(report, name)}", flush=True)
            right, total = right + (report.most_like == name), total + 1
    print(f"{right} of {total} right")
    if rival.missing():
        print(f"llama.cpp is not installed: {rival.missing()}")


def _row(report: EndpointReport, name: str) -> str:
    own = next((each.kld_mean for each in report.candidates if each.weights == name), float("nan"))
    return (
        f"{report.most_like:18} {report.confidence:7.2%} {report.method:10} {report.kld_mean:9.5f} {own:9.5f}"
        f"  next {report.candidates[1].weights}"
    )


if __name__ == "__main__":
    main()
