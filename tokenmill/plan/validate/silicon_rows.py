"""Rows of measured deployments (the columns of aiconfigurator's silicon table) as deployments and loads.

Owns reading the CSV and what its columns mean, for engines that do everything and for split pools. Who measured a row,
when and for what is not looked at. Predicts nothing; called by scores.py and benchmarks/fit_engines.py.
"""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import find_device
from tokenmill.hardware.weight_formats import WeightFormat, find_format
from tokenmill.plan.cost.closed_loop import Load
from tokenmill.plan.cost.engine_costs import engine_costs
from tokenmill.plan.cost.split import SplitDeployment
from tokenmill.plan.question.deployment import Deployment, plan_memory, room_for
from tokenmill.plan.question.model_names import describe_for_planning
from tokenmill.plan.question.planned_model import PlannedModel

COLUMNS = (
    *("backend", "model_path", "system", "mode", "isl", "osl", "gemm_quant_mode", "batch_size", "tp_size", "pp_size"),
    *("attention_dp_size", "moe_tp_size", "moe_ep_size", "silicon_ttft_ms", "silicon_tpot_ms"),
)
_FORMATS = {"": "bf16", "fp8": "fp8", "fp8_block": "fp8-block", "nvfp4": "nvfp4", "bf16": "bf16", "bfloat16": "bf16"}
_REQUESTS_PER_USER = 10
_UTILIZATION = 0.95  # engines in a benchmark get all the memory that they can use
_MAX_WORKERS = 64
_WIDEST_TP = 16


@dataclass(frozen=True, slots=True)
class SiliconRow:
    line: int
    deployment: Deployment | SplitDeployment
    load: Load
    ttft_ms: float
    tpot_ms: float
    group: str  # model, device, engine, format and parallelism: rows of one measured configuration

    @property
    def is_moe(self) -> bool:
        return self.deployment.model.is_moe

    @property
    def is_split(self) -> bool:
        return isinstance(self.deployment, SplitDeployment)


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
        try:
            yield _row(line, row)
        except UserError as error:
            yield SkippedRow(line, error.problem)
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}, line {line}: {error}", "correct the number") from None


def _row(line: int, row: dict[str, str]) -> SiliconRow:
    model, device = describe_for_planning(row["model_path"]), find_device(row["system"])
    bare = Deployment(
        model=model,
        device=device,
        weights=_weights(row["gemm_quant_mode"], model),
        engine=row["backend"],
        utilization=_UTILIZATION,
    )
    bare = replace(bare, kv_bytes=1.0 if bare.weights.name in ("fp8", "nvfp4") else 2.0)
    split = row["mode"] == "disagg" or _is_rack(row, bare)
    deployment, users = _split(row, bare) if split else _aggregated(row, bare)
    drift = engine_costs(bare.engine, device.family).drift
    load = Load(int(row["isl"]), int(row["osl"]), users, drift, _REQUESTS_PER_USER)
    group = "/".join((model.name, device.name, bare.engine, bare.weights.name, deployment.parallelism))
    return SiliconRow(line, deployment, load, float(row["silicon_ttft_ms"]), float(row["silicon_tpot_ms"]), group)


def _weights(column: str, model: PlannedModel) -> WeightFormat:
    if model.stored_format == "mxfp4":
        return find_format("mxfp4")  # native; the column names the engine's path instead
    if not column and model.stored_format != "bf16":
        return find_format(model.stored_format)
    return find_format(_FORMATS.get(column, column))


def _aggregated(row: dict[str, str], bare: Deployment) -> tuple[Deployment, int]:
    """(deployment, its users): `batch_size` counts those of one attention replica."""
    placed = _placed(row, "", bare)
    written = row["attention_dp_size"]
    users = max(1, int(float(row["batch_size"]))) * (_size(written) if written else placed.data_parallel)
    return replace(placed, pp=_size(row["pp_size"]), max_sequences=max(users, 256)), users


def _is_rack(row: dict[str, str], bare: Deployment) -> bool:
    """Attention and experts sharded over more devices than any engine does, or over a number that does not divide the
    heads: no tp, but the count of all devices of split pools."""
    tp = _size(row["tp_size"])
    too_wide = tp > _WIDEST_TP or max(bare.model.head_counts, default=tp) % tp > 0
    return too_wide and tp == _size(row["moe_tp_size"])


def _split(row: dict[str, str], bare: Deployment) -> tuple[SplitDeployment, int]:
    """Pools as the columns give them. Where the number of workers is missing there are as many for decoding as the
    users' KV needs, and as many for prompts as keep up; sizes too small for the weights are doubled until they fit."""
    pools = ("prefill_", "decode_") if row["mode"] == "disagg" else ("", "")
    prefill, decode = (_holding(_placed(row, pool, bare)) for pool in pools)
    workers, batch = row.get("decode_num_workers", ""), row.get("decode_batch_size", "")
    named = re.search(r"_c(\d+)_", row.get("id", ""))  # a row's name holds its users: no column does
    if named:
        users = int(named[1])
    elif workers and batch:
        users = _size(batch) * _size(workers) * _size(row["decode_attention_dp_size"])
    elif row["batch_size"]:
        users = _size(row["batch_size"])
    else:
        raise UserError("split row without a number of users")
    tokens = int(row["isl"]) + int(row["osl"])
    fit = max(1, room_for(decode, tokens).sequences)
    num_decode = _size(workers) if workers else min(_MAX_WORKERS, -(-users // fit))
    given = row.get("prefill_num_workers", "")
    num_prefill = _size(given) if given else 0
    decode = replace(decode, max_sequences=max(256, users))
    return SplitDeployment(prefill, decode, num_prefill, num_decode), users


def _placed(row: dict[str, str], pool: str, bare: Deployment) -> Deployment:
    """How one engine is distributed over devices.

    Some rows hold tp x ep (or tp x dp) where the same devices serve both: more devices than the link joins, as expert
    sizes that are equal. A tp that does not divide the heads cannot be one: attention is replicated there.
    """
    tp, copies = _size(row[f"{pool}tp_size"]), _size(row[f"{pool}attention_dp_size"])
    expert_tp, ep = _size(row[f"{pool}moe_tp_size"]), _size(row[f"{pool}moe_ep_size"])
    is_moe, reach = bare.model.is_moe, max(8, bare.device.link.devices)
    if is_moe and tp * copies > reach and expert_tp == ep == _root(tp * copies):
        return replace(bare, tp=1 if copies > 1 else ep, data_parallel=ep if copies > 1 else 1, ep=ep)
    if is_moe and tp * copies > reach and tp == copies:
        return replace(bare, tp=1, data_parallel=tp, ep=tp)
    if max(bare.model.head_counts, default=tp) % tp:
        tp, copies, ep = 1, tp, tp
    if tp * copies < expert_tp * ep:  # attention replicas follow from the expert sizes
        copies = expert_tp * ep // tp
    return replace(bare, tp=tp, data_parallel=copies, ep=min(ep, tp * copies) if is_moe else 1)


def _holding(deployment: Deployment) -> Deployment:
    while not plan_memory(deployment).fits and deployment.group < deployment.model.num_layers:
        wider = 2 * deployment.data_parallel
        deployment = replace(
            deployment, data_parallel=wider, ep=deployment.tp * wider if deployment.model.is_moe else 1
        )
    return deployment


def _root(number: int) -> int:
    return round(number**0.5)


def _size(text: str) -> int:
    return max(1, int(float(text))) if text else 1
