"""Experts, latent attention and Mamba-2 hybrids on one GPU: tokenmill and vLLM on the same work, made-up weights.

    python benchmarks/gpu_architectures.py [--only SHAPE,...] [--engines tokenmill,vllm] [--workloads single,...]
        [--out FOLDER] [--limit SECONDS] [--seconds SECONDS] [--vllm-packages FOLDER] [--quick] [--layers N]

Shapes are those of gpu_shapes.py, workloads those of gpu_workloads.py, shorter. Every engine and shape has a process of
its own, the engines of a shape one after the other; the next process imports its packages while one is measured, and
touches the GPU only when that one has ended. `--limit` ends a process that takes longer, `--seconds` begins no further
one; whatever fails is reported and the rest goes on. In FOLDER: rows.jsonl (a figure a line, as it is measured),
table.md (with ratios and floors), log.txt (what the engines said).

`--quick` (alone: our engine; all shapes at once, two layers each, a few steps) finds crashes in a minute and leaves
compiled kernels in Triton's cache, so that the run after it starts sooner. Its figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu_shapes import ROUNDED, SHAPES, VLLM_ENVIRONMENT, VLLM_OPTIONS, floors, write
from benchmarks.gpu_workloads import Workloads, report

ENGINES = ("tokenmill", "vllm")  # vLLM takes longest to import: meanwhile ours is measured
WORKLOADS = "single,decode64,decode256,prefill,mixed"
DEFAULT_SHAPES = "qwen3-30b-a3b,qwen3-30b-a3b-fp8,gpt-oss-20b,deepseek-v2-lite,falcon-h1-7b"
SIZES = {"steps": 128, "longest": 384, "prompt": 8192}
QUICK_SIZES = {"steps": 4, "longest": 128, "prompt": 2500}
VLLM_SCRIPT = Path(__file__).parent / "peers" / "vllm_bench.py"
# vLLM captures more sizes by default, which takes it longer to start; the batches measured here are among these.
CAPTURED = [1, 2, 4, 8, *range(16, 257, 16)]
LOWER_IS_BETTER = ("ttft_ms", "tpot_ms", "seconds")
FREE_MIB = 2048  # that other processes may hold when one starts
EXIT_SECONDS = 20.0  # between its last word and its end
SHOWN_LINES = 40  # of the log of an engine that failed

Row = dict[str, Any]


def measure(shape: str, model: Path, names: list[str], quick: bool, wait: bool) -> None:
    """Our engine, in this process: a line of JSON per workload."""
    import gc

    import torch

    from tokenmill import LLM, SamplingParams

    if wait:
        sys.stdin.readline()
    began = time.perf_counter()
    options: dict[str, Any] = {"context": 16384, "concurrency": 256, "batch_tokens": 16384}
    options |= {"memory": 12 << 30} if quick else {"gpu_memory_utilization": 0.9}
    options |= {"quantization": ROUNDED[shape]} if shape in ROUNDED else {}
    with LLM(model, load_format="dummy", device="cuda", **options) as llm:
        runtime = llm.parts.runtime
        loaded = time.perf_counter() - began
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, ignore_eos=True))
        report("start to first token", seconds=time.perf_counter() - began, load_seconds=loaded)
        declined = "; ".join(f"{name}: {reason}" for name, reason in runtime.declined_executors)
        print(json.dumps({"workload": "executor", "name": runtime.executor.name, "declined": declined}), flush=True)
        began = time.perf_counter()
        _prepare(runtime)
        report("warm up", seconds=time.perf_counter() - began)
        gc.freeze()  # as the engine process of a server does

        def generate(
            prompts: list[list[int]], lengths: list[int], features: Sequence[dict[str, Any]] | None = None
        ) -> float:
            rows = zip(lengths, features or [{}] * len(lengths), strict=True)
            params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n, **more) for n, more in rows]
            start = time.perf_counter()
            outputs = llm.generate(prompts, params)
            seconds = time.perf_counter() - start
            assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
            return seconds

        Workloads(generate, **(QUICK_SIZES if quick else SIZES), continues=True).run(names)
        report("peak memory", gib=torch.cuda.max_memory_reserved() / 2**30)
    for workload, floor in floors(shape).items():
        print(json.dumps({"workload": workload, "floor_ms": round(floor, 3)}), flush=True)


def _prepare(runtime: Any) -> None:
    """Compile and capture the kinds of steps that the workloads have: no filters of tokens, no shared prefixes."""
    executor = runtime.executor
    kinds = getattr(executor, "_unprepared", None)
    if kinds is not None:
        plain = [kind for kind in kinds if not getattr(kind, "filtered", False) and not getattr(kind, "shared", False)]
        executor._unprepared = plain
    while runtime.runner.prepare():
        pass


@dataclass(eq=False)
class Job:
    """One engine on one shape, as a process that waits for a line before it uses the GPU."""

    engine: str
    shape: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[str] | None = None
    lines: queue.Queue[str | None] = field(default_factory=queue.Queue)
    stopped: bool = False

    @property
    def name(self) -> str:
        return f"{self.engine} {self.shape}"

    def start(self) -> None:
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=self.environment, start_new_session=True,
            )  # fmt: skip
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()

    def _read(self, output: IO[str]) -> None:
        for line in output:
            self.lines.put(line)
        self.lines.put(None)

    def release(self) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already; its log says why
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def stop(self) -> None:
        """End the process and what it started."""
        if self.process is None or self.stopped:
            return
        self.stopped = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Results:
    """Keeps rows as they come: in a file, on stdout, in the table."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.rows: list[Row] = []
        folder.mkdir(parents=True, exist_ok=True)

    def keep(self, job: Job, row: Row) -> None:
        row = {"engine": job.engine, "shape": job.shape} | row
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        with (self._folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def keep_log(self, job: Job, failed: bool) -> None:
        """Add what an engine said to log.txt; of one that failed the end is shown."""
        text = job.log.read_text(errors="replace")
        with (self._folder / "log.txt").open("a") as file:
            file.write(f"=== {job.name}\n{text}\n")
        if failed:
            print(f"--- {job.name}\n" + "\n".join(text.splitlines()[-SHOWN_LINES:]), flush=True)

    def write_table(self) -> str:
        text = table(self.rows)
        (self._folder / "table.md").write_text(text + "\n")
        return text


def run_job(job: Job, results: Results, limit: float) -> None:
    """Let a job use the GPU until it ends, or for `limit` seconds."""
    began = time.perf_counter()
    job.release()
    line: str | None = ""
    while line is not None:
        try:
            line = job.lines.get(timeout=max(0.1, began + limit - time.perf_counter()))
        except queue.Empty:
            results.keep(job, {"workload": "process", "error": f"ended after {limit:.0f} s"})
            break
        if line is not None and line.startswith('{"workload"'):
            results.keep(job, json.loads(line))
        elif line:
            with job.log.open("a") as log:
                log.write(line)
    assert job.process is not None
    status: int | None = None  # still running
    with contextlib.suppress(subprocess.TimeoutExpired):
        status = job.process.wait(EXIT_SECONDS if line is None else 0.1)
    job.stop()
    if line is None and status != 0:
        results.keep(job, {"workload": "process", "error": f"status {status}; log.txt says why"})
    results.keep(job, {"workload": "process", "seconds": round(time.perf_counter() - began, 1)})
    results.keep_log(job, failed=status != 0)


def wait_for_memory(seconds: float = 15.0) -> None:
    """Until the GPU's memory is free again."""
    ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        try:
            used = int(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()[0])
        except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
            return
        if used < FREE_MIB:
            return
        time.sleep(0.3)


def table(rows: list[Row]) -> str:
    """Shape, workload and figure: ours, vLLM's, the ratio (above 1: we are faster), and our time over the floor."""
    figures: dict[tuple[str, str, str], dict[str, float]] = {}
    floor: dict[tuple[str, str], float] = {}
    for row in rows:
        shape, workload = row["shape"], row["workload"]
        for name, value in row.items():
            if name == "floor_ms":
                floor[shape, workload] = value
            elif isinstance(value, (int, float)):
                figures.setdefault((shape, workload, name), {})[row["engine"]] = value
    lines = ["| shape | workload | figure | tokenmill | vLLM | ratio | floor, ms | of floor |", "|---" * 8 + "|"]
    for (shape, workload, name), by_engine in figures.items():
        ours, theirs = by_engine.get("tokenmill"), by_engine.get("vllm")
        ratio = ""
        if ours and theirs:
            ratio = f"{theirs / ours if name in LOWER_IS_BETTER else ours / theirs:.2f}"
        least, share = floor.get((shape, workload)), ""
        if least is not None and ours and name == "tpot_ms":
            share = f"{least / ours:.0%}"
        elif least is not None and ours and workload.startswith("prefill"):
            share = f"{least * ours / (8 * int(workload.rpartition('x')[2])) / 1e3:.0%}"
        shown = [f"{value:g}" if value else "" for value in (ours, theirs)]
        lines.append(f"| {shape} | {workload} | {name} | {' | '.join(shown)} | {ratio} | {least or ''} | {share} |")
    lines += [f"{row['engine']} {row['shape']} {row['workload']}: {row['error']}" for row in rows if "error" in row]
    return "\n".join(lines)


def make_job(engine: str, shape: str, model: Path, arguments: argparse.Namespace) -> Job:
    log = model.with_name(f"{engine} {shape}.log")
    environment = {"VLLM_LOGGING_LEVEL": "INFO", "PYTHONUNBUFFERED": "1"} | os.environ
    if engine == "tokenmill":
        command = [sys.executable, __file__, "--alone", str(model), "--only", shape]
        command += ["--workloads", arguments.workloads, *(["--quick"] if arguments.quick else [])]
        return Job(engine, shape, command, environment, log)
    environment |= VLLM_ENVIRONMENT.get(shape, {})
    sizes = QUICK_SIZES if arguments.quick else SIZES
    options: dict[str, Any] = {"cudagraph_capture_sizes": CAPTURED} | VLLM_OPTIONS.get(shape, {})
    if arguments.quick:
        options |= {"enforce_eager": True, "gpu_memory_utilization": 0.12}
    command = [arguments.vllm_python, str(VLLM_SCRIPT), str(model), "--workloads", arguments.workloads]
    command += ["--wait", "--spread-routes", "--options", json.dumps(options)]
    for name, value in sizes.items():
        command += [f"--{name}", str(value)]
    if arguments.vllm_packages is not None:
        paths = [str(arguments.vllm_packages), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return Job(engine, shape, command, environment, log)


def run_in_turn(jobs: list[Job], results: Results, limit: float, seconds: float) -> None:
    began = time.perf_counter()
    for number, job in enumerate(jobs):
        if job.process is None:
            job.start()
        if number + 1 < len(jobs):
            jobs[number + 1].start()  # imports its packages meanwhile
        left = seconds - (time.perf_counter() - began)
        if left < 30:
            results.keep(job, {"workload": "process", "error": "not begun: the time is up"})
            job.stop()
            continue
        wait_for_memory()
        run_job(job, results, min(limit, left))
        results.write_table()


def run_together(jobs: list[Job], results: Results, limit: float) -> None:
    for job in jobs:
        job.start()
    threads = [threading.Thread(target=run_job, args=(job, results, limit)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=DEFAULT_SHAPES, help=f"shapes, of {', '.join(SHAPES)}")
    parser.add_argument("--engines", default="", help="tokenmill,vllm; with --quick tokenmill")
    parser.add_argument("--workloads", default=WORKLOADS)
    parser.add_argument("--out", type=Path, default=Path("gpu_architectures"))
    parser.add_argument("--limit", type=float, default=200.0, help="seconds of one process")
    parser.add_argument("--seconds", type=float, default=590.0, help="of all of them")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--layers", type=int, default=0, help="of each shape; 0: all, with --quick 2")
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--vllm-packages", type=Path, help="folder with vLLM, put on its PYTHONPATH")
    parser.add_argument("--alone", type=Path, metavar="MODEL", help="only our engine, in this process, on this folder")
    arguments = parser.parse_args()
    if arguments.alone is not None:
        measure(arguments.only, arguments.alone, arguments.workloads.split(","), arguments.quick, wait=True)
        return
    shapes = arguments.only.split(",")
    unknown = [shape for shape in shapes if shape not in SHAPES]
    if unknown:
        raise SystemExit(f"unknown shapes {', '.join(unknown)}: give some of {', '.join(SHAPES)}")
    engines = (arguments.engines or ("tokenmill" if arguments.quick else ",".join(ENGINES))).split(",")
    layers = arguments.layers or (2 if arguments.quick else 0)
    results = Results(arguments.out)
    with tempfile.TemporaryDirectory() as folder:
        models = {shape: write(shape, Path(folder) / shape, layers) for shape in shapes}
        jobs = [make_job(engine, shape, models[shape], arguments) for shape in shapes for engine in engines]
        try:
            if arguments.quick:
                run_together(jobs, results, arguments.limit)
            else:
                run_in_turn(jobs, results, arguments.limit, arguments.seconds)
        finally:
            for job in jobs:
                job.stop()
    print(results.write_table())


if __name__ == "__main__":
    main()
