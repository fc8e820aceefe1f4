"""`tokenmill inspect`: what a checkpoint is, what it needs, and which kernels run it here."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tokenmill.cli.options import DEFAULT_MODEL, AsJson, Model, Verbose, engine_options
from tokenmill.cli.output import emit
from tokenmill.cli.screens.inspection import inspect_screen
from tokenmill.config import ADAPTER_OPTIONS, BY_DEFAULT, EngineConfig

_SHAPES = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "context_length",
    "activation",
    "tie_embeddings",
)


_NOT_SHOWN = """memory gpu_memory_utilization prefix_caching scheduling concurrency threads seed speculate draft_tokens
itl jump_forward kv_policy kv_host_memory kv_disk kv_disk_size kv_redis kv_secret_file kv_budget_policy kv_budget"""


@engine_options(without=(*_NOT_SHOWN.split(), *ADAPTER_OPTIONS))
def inspect(
    model: Model = DEFAULT_MODEL,
    as_json: AsJson = False,
    _verbose: Verbose = False,
    *,
    engine: EngineConfig,
) -> None:
    """Show architecture, bytes, KV cost, tokenizer, and which kernel takes each op and why faster ones declined."""
    from tokenmill.checkpoint.sources import resolve
    from tokenmill.runtime.report import inspect_model

    found = resolve(model)
    report = inspect_model(found.path, engine)
    description = report.description
    result: dict[str, Any] = {
        "model": model,
        "name": description.name,
        "path": str(found.path),
        "source": found.source,
        "architecture": description.architecture,
        "parameters": report.parameters,
        "bytes": report.bytes,
        "bits_per_weight": round(8 * report.bytes / report.parameters, 3),
        "shapes": {name: getattr(description, name) for name in _SHAPES},
        "weights": [asdict(each) for each in report.weights],
        "kv_cache": asdict(report.kv),
        "experts": None if report.experts is None else asdict(report.experts),
        "tokenizer": asdict(report.tokenizer),
        "executor": {"chosen": report.executor.runs_on, "declined": list(report.executor.declined)},
        "kernels": [
            {"op": each.what, "implementation": each.runs_on, "declined": list(each.declined)}
            for each in report.kernels
        ],
        "options": [asdict(each) for each in report.settings if each.value is not None and each.source != BY_DEFAULT],
    }
    emit(result, as_json, lambda: inspect_screen(result))
