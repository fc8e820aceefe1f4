"""Sends damaged inputs through every door of tokenmill: each is accepted or refused with a UserError (HTTP: a 4xx).

    python tools/fuzz.py [--inputs 100000] [--seed 0] [--only DOOR ...] [--seconds N] [--save FOLDER]

Inputs are mutated from a valid corpus by a generator that the seed, the door and the number of the input determine. A
crash, a hang, an exception of any other kind, too much memory or a 5xx is a finding: it is printed and its input saved.
Doors: files (GGUF, safetensors, config.json, tokenizer), templates, grammars, regexes, schemas, and the bodies of all
HTTP routes, sent to a server that runs a tiny model. Exit code 1 if there was a finding.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.fuzzing.doors import DOORS, Input
from tools.fuzzing.processes import Batch, Report, Tester, make_input

BATCH_INPUTS = 250
NUM_PROCESSES = 2
_SHOWN_FINDINGS = 12


def fuzz(
    num_inputs: int,
    seed: int = 0,
    only: list[str] | None = None,
    seconds: float = 0.0,
    save: Path = Path("scratch/fuzz"),
) -> dict[str, Report]:
    """Reports by door. `seconds` > 0 ends the run early."""
    names = only or list(DOORS)
    save.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_server()) if "http" in names else ""
        pending = deque(_batches(names, num_inputs, seed, server))
        reports = {name: Report() for name in names}
        testers = [Tester() for _ in range(NUM_PROCESSES)]
        for tester in testers:
            stack.callback(tester.close)
        deadline = time.monotonic() + (seconds or float("inf"))
        while pending or not all(tester.idle for tester in testers):
            if time.monotonic() > deadline:
                break
            for tester in testers:
                rest = tester.poll(reports)
                if rest is not None:
                    pending.appendleft(rest)
                if tester.idle and pending:
                    tester.begin(pending.popleft())
            wait([tester.pipe for tester in testers if tester.pipe is not None and not tester.idle], timeout=0.2)
        if server:
            _check_server(server, reports["http"])
    _save(reports, seed, save)
    return reports


def _batches(names: list[str], num_inputs: int, seed: int, server: str) -> Iterator[Batch]:
    total = sum(DOORS[name][1] for name in names)
    for name in names:
        count = max(1, round(num_inputs * DOORS[name][1] / total))
        for start in range(0, count, BATCH_INPUTS):
            yield Batch(name, DOORS[name][0], start, min(BATCH_INPUTS, count - start), seed, server)


@contextlib.contextmanager
def _server() -> Iterator[str]:
    """A real server with a model of some kilobytes."""
    from tests.e2e.serving import serving
    from tools.fuzzing.corpus import write_gguf

    with tempfile.TemporaryDirectory(prefix="tokenmill-fuzz-") as folder:
        path = Path(folder) / "tiny.gguf"
        write_gguf(path, "llama")
        flags = ("--context", "128", "--concurrency", "8", "--no-access-log", "--device", "cpu")
        with serving(path, *flags) as server:
            yield server.url


def _check_server(url: str, report: Report) -> None:
    """After all that it still computes, with the engine process it began with."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
            healthy = answer.status == 200
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
    except OSError as error:
        healthy, lines = False, [str(error)]
    restarts = [line for line in lines if "engine_restarts" in line and not line.startswith("#")]
    if not healthy or any(float(line.split()[-1]) for line in restarts):
        report.outcomes["finding"] += 1
        report.findings[-1] = f"the server did not stay well: healthy {healthy}, {restarts}"


def _save(reports: dict[str, Report], seed: int, save: Path) -> None:
    """The inputs of findings, made again from their numbers."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-fuzz-") as folder:
        for name, report in reports.items():
            numbers = [number for number in report.findings if number >= 0]
            if not numbers:
                continue
            own = Path(folder) / name
            own.mkdir()
            door = DOORS[name][0](own, "")
            for number in numbers:
                data: Input = make_input(door, seed, name, number)
                target = save / f"{name}-{seed}-{number}"
                target.mkdir(exist_ok=True)
                for file, content in data.items():
                    (target / file).write_bytes(content)
                (target / "finding.txt").write_text(report.findings[number] + "\n")


def print_table(reports: dict[str, Report]) -> int:
    """Returns the number of findings."""
    print(f"{'door':<14}{'inputs':>9}{'accepted':>10}{'refused':>10}{'findings':>10}{'ms each':>9}")
    rows = [*reports.items()]
    total = Report()
    for _, report in rows:
        total.outcomes.update(report.outcomes)
        total.seconds += report.seconds
    for name, report in [*rows, ("total", total)]:
        count = sum(report.outcomes.values())
        cost = 1000 * report.seconds / max(count, 1)
        outcomes = report.outcomes
        print(
            f"{name:<14}{count:>9,}{outcomes['accepted']:>10,}{outcomes['refused']:>10,}{outcomes['finding']:>10,}"
            f"{cost:>9.2f}"
        )
    for name, report in rows:
        for number, what in list(report.findings.items())[:_SHOWN_FINDINGS]:
            print(f"{name} input {number}: {what}")
    return total.outcomes["finding"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(DOORS))
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after this long")
    parser.add_argument("--save", type=Path, default=Path("scratch/fuzz"))
    options = parser.parse_args()
    began = time.monotonic()
    reports = fuzz(options.inputs, options.seed, options.only, options.seconds, options.save)
    num_findings = print_table(reports)
    num_inputs = sum(sum(report.outcomes.values()) for report in reports.values())
    print(f"{num_inputs:,} inputs in {time.monotonic() - began:.0f} s, seed {options.seed}: {num_findings} findings")
    sys.exit(1 if num_findings else 0)


if __name__ == "__main__":
    main()
