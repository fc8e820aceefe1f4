"""Rows of measured deployments (the columns of aiconfigurator's silicon table) as deployments and loads.

Owns reading the CSV and what is known of how the rows were made: which columns mean what, and where imports wrote
products instead of sizes. Predicts nothing; called by validate.py and benchmarks/fit_engines.py.
"""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import find_device
from tokenmill.hardware.weight_formats import find_format
from tokenmill.plan.cost.closed_loop import Load
from tokenmill.plan.cost.engine_costs import engine_costs
from tokenmill.plan.question.deployment import Deployment
from tokenmill.plan.question.model_names import describe_for_planning

COLUMNS = (
    *("backend", "model_path", "system", "mode", "isl", "osl", "gemm_quant_mode", "batch_size", "tp_size", "pp_size"),
    *("attention_dp_size", "moe_tp_size", "moe_ep_size", "silicon_ttft_ms", "silicon_tpot_ms"),
)
_FORMATS = {"": "bf16", "fp8": "fp8", "fp8_block": "fp8-block", "nvfp4": "nvfp4", "bf16": "bf16", "bfloat16": "bf16"}
_SWEEP_SPREAD = 0.2  # public sweeps draw lengths from 0.8 to 1.0 of the nominal ones
_ROUND_SPREAD = 0.1  # studies with lengths in thousands behave as if lengths varied; those in powers of two are exact
_REQUESTS_PER_USER = 10


@dataclass(frozen=True, slots=True)
class SiliconRow:
    line: int
    deployment: Deployment
    load: Load
    ttft_ms: float
    tpot_ms: float
    group: str  # model, device, engine, format and parallelism: rows of one measured configuration


@dataclass(frozen=True, slots=True)
class SkippedRow:
    line: int
    reason: str


def read_rows(path: Path) -> Iterator[SiliconRow | SkippedRow]:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}", "give the CSV of measured rows") from None
    reader = csv.DictReader(StringIO(text))
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise UserError(f"{path} lacks the columns {', '.join(missing)}", "see docs/planner.md for the layout")
    for line, row in enumerate(reader, start=2):
        if row["mode"] != "agg":
            yield SkippedRow(line, "disaggregated")
            continue
        try:
            yield _row(line, row)
        except UserError as error:
            yield SkippedRow(line, error.problem)
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}, line {line}: {error}", "correct the number") from None


def _row(line: int, row: dict[str, str]) -> SiliconRow:
    model = describe_for_planning(row["model_path"])
    parallel = _parallelism(row, max(model.head_counts, default=0))
    source = row.get("silicon_data_source", "")
    concurrency = _concurrency(row, source, parallel.data_parallel)
    stored = row["gemm_quant_mode"]
    weights = find_format(_FORMATS.get(stored, stored) if stored or model.stored_format == "bf16" else "bf16")
    if model.stored_format == "mxfp4":
        weights = find_format("mxfp4")  # native; the column names the engine's path instead
    elif not stored and model.stored_format != "bf16":
        weights = find_format(model.stored_format)
    eight_bit_kv = weights.name in ("fp8", "nvfp4") and row["backend"] != "sglang"
    deployment = Deployment(
        model=model,
        device=find_device(row["system"]),
        weights=weights,
        kv_bytes=1.0 if eight_bit_kv else 2.0,
        engine=row["backend"],
        tp=parallel.tp,
        pp=_size(row["pp_size"]),
        ep=parallel.ep if model.is_moe else 1,
        data_parallel=parallel.data_parallel,
        max_sequences=max(concurrency, 256),
    )
    load = Load(int(row["isl"]), int(row["osl"]), concurrency, _spread(row, source), _REQUESTS_PER_USER)
    group = "/".join((model.name, deployment.device.name, deployment.engine, weights.name, str(parallel)))
    return SiliconRow(line, deployment, load, float(row["silicon_ttft_ms"]), float(row["silicon_tpot_ms"]), group)


@dataclass(frozen=True, slots=True)
class _Parallelism:
    tp: int
    data_parallel: int
    ep: int

    def __str__(self) -> str:
        return f"tp{self.tp}dp{self.data_parallel}ep{self.ep}"


def _parallelism(row: dict[str, str], heads: int) -> _Parallelism:
    """How the model is distributed over devices.

    Imports of the public sweeps wrote tp x ep (or tp x dp) where the run used the same devices for both: tp 64 with
    expert sizes 8 and 8 is one node of 8 (the run's own name says tp8 ep8). A tp that does not divide the heads cannot
    be one: such rows count all devices of a rack-wide disaggregated deployment.
    """
    tp, copies = _size(row["tp_size"]), _size(row["attention_dp_size"])
    expert_tp, ep = _size(row["moe_tp_size"]), _size(row["moe_ep_size"])
    if _is_sweep(row.get("silicon_data_source", "")):
        if expert_tp == ep > 1 and tp * copies == expert_tp * ep:
            devices, copied = ep, copies > 1
            return _Parallelism(1 if copied else devices, devices if copied else 1, devices)
        if tp == copies > 1:
            return _Parallelism(1, tp, tp)
    if heads % tp:
        raise UserError("tp does not divide the heads: not one aggregated engine")
    if tp * copies < expert_tp * ep:  # attention replicas follow from the expert sizes
        copies = expert_tp * ep // tp
    return _Parallelism(tp, copies, min(ep, tp * copies))


def _concurrency(row: dict[str, str], source: str, copies: int) -> int:
    stated = re.search(r"silicon_concurrency=(\d+)", source) or re.search(r"_c(\d+)_", row.get("id", ""))
    return int(stated[1]) if stated else max(1, int(float(row["batch_size"]))) * copies


def _spread(row: dict[str, str], source: str) -> float:
    if _is_sweep(source):
        return _SWEEP_SPREAD
    if int(row["isl"]) % 1000 == 0:
        return _ROUND_SPREAD
    return engine_costs(row["backend"]).drift


def _is_sweep(source: str) -> bool:
    """Rows of the public nightly sweeps (the others come from single studies with fixed lengths)."""
    return source.startswith(("db-dump", "source_file=20")) or "gap-analysis.csv" in source


def _size(text: str) -> int:
    return max(1, int(float(text))) if text else 1
