"""Merges adapters into a base: as floats, or quantized again by a recipe, with the loss of that measured.

A quantized base is expanded to float32 first, so that the merged floats are exactly what base plus adapter computes
unmerged; the quantize job then rounds them anew, and its gate compares the result with those floats. The codes of the
base are never edited: a grid sized for the base can swallow a small change whole. How far the adapter itself moves the
predictions is measured beside it, since a rounding that costs as much as the adapter gives is not worth serving.
Called by `tokenmill convert --adapter`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tokenmill.checkpoint.adapters.peft import read_adapter
from tokenmill.checkpoint.sources import resolve
from tokenmill.errors import UserError
from tokenmill.quantize.convert import DENSE, GGUF, cleaned_up, convert
from tokenmill.quantize.finish import GateRequest, measure
from tokenmill.quantize.gguf_job import GGUFJob, run_gguf_job
from tokenmill.quantize.job import QuantizeJob, prepare, run_job
from tokenmill.quantize.merge_source import MergedSource, WeightedAdapter
from tokenmill.quantize.recipe import RecipeRequest

Progress = Callable[[int, int, float], None]


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    path: Path
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Requantization:
    """How the merged floats are rounded: by a recipe, or (`type_name`) into a GGUF of that type."""

    recipe: RecipeRequest = field(default_factory=RecipeRequest)
    type_name: str = ""
    calibration: Path | None = None
    device: str = "auto"
    gate: GateRequest = field(default_factory=GateRequest)


@dataclass(frozen=True, slots=True)
class MergeJob:
    model: str
    out: Path
    adapters: tuple[AdapterChoice, ...]
    format: str = ""  # of floats: safetensors or gguf; of a requantization: a name of FILE_FORMATS
    dtype: str = "auto"
    requantize: Requantization | None = None  # None: written as floats


def parse_adapter(text: str) -> AdapterChoice:
    """DIR or DIR=WEIGHT."""
    path, equals, weight = text.rpartition("=")
    if not equals or Path(text).is_dir():
        return AdapterChoice(Path(text))
    try:
        value = float(weight)
    except ValueError:
        return AdapterChoice(Path(text))
    if not math.isfinite(value):
        raise UserError(f"the weight of adapter '{path}' is {weight}", "give a number such as 0.7")
    return AdapterChoice(Path(path), value)


def merge(job: MergeJob, on_block: Progress = lambda _done, _all, _left: None) -> dict[str, Any]:
    """What was written, by which adapters, and what it cost."""
    path = resolve(job.model).path
    source = MergedSource(path, [WeightedAdapter(read_adapter(each.path), each.weight) for each in job.adapters])
    merged = {
        "adapters": [{"path": str(each.path), "weight": each.weight} for each in job.adapters],
        "merged_tensors": source.num_changed,
        "base_is_quantized": any(not source.is_plain(prefix) for prefix in source.matrices),
    }
    request = job.requantize
    if request is None and job.format in ("", DENSE):
        return {**asdict(convert(path, job.out, DENSE, job.dtype, source)), **merged}
    if job.out.exists():
        raise UserError(f"{job.out} exists", "give another output, or remove it")
    if not job.out.absolute().parent.is_dir():
        raise UserError(f"{job.out.absolute().parent} is not a directory", "create it, or give another output")
    working = job.out.with_name(f".{job.out.name}.merging")
    with cleaned_up(working):
        working.mkdir()
        floats = working / f"{path.stem}-merged"
        convert(path, floats, DENSE, job.dtype if request is None else "float32", source)
        if request is None:
            if job.format != GGUF:
                raise UserError(f"merged floats cannot be {job.format}", "give --method to quantize them, or --type")
            return {**asdict(convert(floats, job.out, GGUF)), **merged}
        wide = any(source.stored_dtype(name) is torch.bfloat16 for name in source.vectors)
        if job.dtype == "auto" and wide:  # what is not quantized keeps the range that the base has
            job = replace(job, dtype="bfloat16")
        return {**_requantize(job, request, floats, path, on_block), **merged}


def _requantize(
    job: MergeJob, request: Requantization, floats: Path, base: Path, on_block: Progress
) -> Mapping[str, Any]:
    held_out = ""
    if request.type_name or job.format == GGUF:
        gguf = GGUFJob(
            model=str(floats),
            out=job.out,
            method=request.recipe.method if request.recipe.method == "imatrix" else "rtn",
            type_name=request.type_name,
            bits=request.recipe.bits,
            calibration=request.calibration,
            device=request.device,
        )
        report = dict(run_gguf_job(gguf, request.gate, 0, on_block))
    else:
        quantize = QuantizeJob(
            model=str(floats),
            out=job.out,
            recipe=request.recipe,
            format=job.format,
            dtype=job.dtype,
            calibration=request.calibration,
            device=request.device,
            restart=True,  # the floats are made anew, so blocks of an earlier run are of another source
            gate=request.gate,
        )
        prepared = prepare(quantize)
        held_out = prepared.calibration.held_out if prepared.calibration else ""
        report = asdict(run_job(prepared, on_block))
    report["adapter_effect"] = _adapter_effect(request.gate, floats, base, held_out)
    return report


def _adapter_effect(gate: GateRequest, floats: Path, base: Path, held_out: str) -> Mapping[str, Any]:
    """How far the base without the adapter is from base plus adapter, on the gate's text: what the merge is for."""
    if not gate.enabled:
        return {}
    unlimited = replace(gate, max_quality_loss=math.inf, max_kld=math.inf)
    figures, _, words = measure(base, unlimited, str(floats), held_out)
    return {"kld_mean": figures["kld_mean"], "perplexity": figures["perplexity"], "text": words}
