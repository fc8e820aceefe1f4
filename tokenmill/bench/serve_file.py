"""The result of `bench serve` as a file, named as vLLM's benchmark names it. Called by the CLI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenmill.bench.serve_job import ServeJob
from tokenmill.errors import UserError


def save(report: dict[str, Any], details: dict[str, Any] | None, job: ServeJob) -> Path:
    """Detailed lists go into the file only."""
    limit = f"-concurrency{job.max_concurrency}" if job.max_concurrency else ""
    model = report["model_id"].split("/")[-1]
    name = job.result_filename or f"{report['label']}-{report['request_rate']}qps{limit}-{model}-{report['date']}.json"
    path = Path(job.result_dir) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if job.append_result else "w", encoding="utf-8") as file:
            if job.append_result and file.tell():
                file.write("\n")
            json.dump(report | (details or {}), file)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", "check --result-dir") from None
    return path
