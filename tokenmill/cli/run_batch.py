"""`tokenmill run-batch`: a file of requests in, a file of answers out, without a server."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli.options import AsJson, Verbose, engine_options
from tokenmill.cli.output import print_json
from tokenmill.cli.progress import print_note, progress_bar
from tokenmill.config import EngineConfig
from tokenmill.serve.config import ServeConfig

_REPORT_SECONDS = 10.0  # between two lines of progress where stderr is not a terminal


@engine_options()
def run_batch(
    input_file: Annotated[Path, typer.Option("--input-file", "-i", help="Requests: JSON lines as OpenAI's batches.")],
    output_file: Annotated[
        Path,
        typer.Option("--output-file", "-o", help="Answers, one JSON line each; what it answers is not asked again."),
    ],
    model: Annotated[str, typer.Option(help="Alias, Hugging Face id, directory or .gguf file.")],
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Further name of the model in requests. Repeatable.")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Answer by workers on a Ray cluster.")] = False,
    ray_workers: Annotated[int, typer.Option(help="Workers on the cluster, each with an engine.")] = 1,
    ray_cpus: Annotated[float, typer.Option(help="CPUs of each worker.")] = 1.0,
    ray_gpus: Annotated[float, typer.Option(help="GPUs of each worker.")] = 0.0,
    ray_address: Annotated[
        str, typer.Option(help="Of the cluster; default: RAY_ADDRESS, one that runs here, or a new one.")
    ] = "",
    as_json: AsJson = False,
    _verbose: Verbose = False,
    *,
    engine: EngineConfig,
) -> None:
    """Answer a file of requests (chat, completions, embeddings) and exit. Run it again to go on after a kill."""
    from tokenmill.serve.offline import MAX_LINE, Counts
    from tokenmill.serve.offline import run_batch as answer_here

    config = ServeConfig(
        served_model_name=tuple(served_model_name or ()), max_body_bytes=MAX_LINE, spare_engine=False, access_log=False
    )
    workers = None
    if ray:
        from tokenmill.ray.batch import Workers
        from tokenmill.ray.batch import run_batch as answer_on_ray

        workers = Workers(ray_workers, ray_cpus, ray_gpus, ray_address)
    began = reported = time.monotonic()
    with progress_bar("answering") as advance:

        def progress(counts: Counts) -> None:
            nonlocal reported
            done, now = counts.completed + counts.failed, time.monotonic()
            advance(done, counts.total)
            if not sys.stderr.isatty() and (now - reported >= _REPORT_SECONDS or done == counts.total):
                reported = now
                rate = (done - counts.resumed) / (now - began)
                line = f"{done} of {counts.total} answered, {counts.failed} failed, {rate:.1f} requests/s"
                print(line, file=sys.stderr, flush=True)

        try:
            job = (model, input_file, output_file, config, engine, progress)
            counts = answer_on_ray(*job, workers) if workers is not None else answer_here(*job)
        except KeyboardInterrupt:
            print("stopped; the same command goes on where this one ended", file=sys.stderr)
            raise
    if as_json:
        seconds = round(time.monotonic() - began, 3)
        print_json({"output": str(output_file), "requests": counts.total, "resumed": counts.resumed,
                    "completed": counts.completed, "failed": counts.failed, "seconds": seconds})  # fmt: skip
    else:
        print_note(f"{counts.total} requests, {counts.failed} failed, {counts.resumed} answered before: {output_file}")
