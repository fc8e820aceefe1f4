"""The end-to-end pass inside a job: blocks as their solvers left them, tuned or trained together, written again.

Solvers hand over codes and scales, which formats pack away; so a job that has this pass keeps both of each block in its
workspace (`raw` files), from which a killed pass begins again; training goes on where it was. The arithmetic is in
tune.py, what is learned of a matrix here (scales) and in train_codes.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tokenmill.model.formats.files.base import FileFormat
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme, element_values, spread
from tokenmill.quantize.block_job import QuantizedBlock, encode_block, to_plain
from tokenmill.quantize.forecast import Forecast, operations_per_second, resident_bytes
from tokenmill.quantize.kv_scales import scales_among
from tokenmill.quantize.source import EMBEDDING, HEAD, SourceModel, narrow, stored_norm
from tokenmill.quantize.train_codes import KeptTraining, TrainedCodes, more_bytes, more_operations, training_options
from tokenmill.quantize.tune import KEPT_BYTES, LOGIT_BYTES, EndToEnd, Student, Tunable, TuneOptions, graph_bytes
from tokenmill.quantize.workspace import Workspace

_HOST = torch.device("cpu")
_PARTS = ("codes", "scales", "zeros", "table")
_RESIDUAL = "residual"
_PASSES = 5.5  # a step's cost in forward passes of its tokens: one down, two back, and what are no products
_LIKELY = 1 / 6  # share of a vocabulary that a text makes likely
_SEQUENCES = 256  # calibration sequences that steps draw from, at most


class ScaledMatrix:
    """A QuantizedMatrix whose float scales are learned; scales that are powers of two or float8 stay."""

    def __init__(self, matrix: QuantizedMatrix) -> None:
        self.matrix = matrix
        free = matrix.scheme.scale_type == "float" and matrix.rotation_seed is None
        self.factors = [torch.ones_like(matrix.scales)] if free else []
        self.shares = [1.0] * len(self.factors)

    def weight(self) -> Tensor:
        if not self.factors:
            return self.matrix.dequantize()
        scales = self.matrix.scales * self.factors[0]
        return element_values(self.matrix) * (spread(scales, self.matrix) * self.matrix.global_scale)

    def reset(self) -> None:
        for each in self.factors:
            each.detach().fill_(1.0)

    def finish(self) -> QuantizedMatrix:
        """With its learned scales, as precise as they were."""
        if not self.factors:
            return self.matrix
        before = self.matrix.scales
        scales = before * self.factors[0].detach()
        if torch.equal(before, before.half().float()):
            scales = scales.half().float()
        return replace(self.matrix, scales=scales)


@dataclass(frozen=True, slots=True, eq=False)
class TunedModel:
    """What the pass needs to know of the job."""

    source: SourceModel
    workspace: Workspace
    file_format: type[FileFormat]
    dtype: torch.dtype
    norm_offset: float
    device: torch.device = _HOST


@dataclass(frozen=True, slots=True)
class LastPass:
    """What a job does at its end: so many steps over scales and norms, or over codes as well."""

    steps: int
    trains: bool = False

    @property
    def options(self) -> TuneOptions:
        return training_options(self.steps) if self.trains else TuneOptions(self.steps)

    def taught(self, sequences: int) -> int:
        """How many calibration sequences steps draw from."""
        return sequences if self.trains else min(sequences, _SEQUENCES)


def with_tuning(
    forecast: Forecast,
    source: SourceModel,
    plan: LastPass,
    sequences: int,
    length: int,
    untied: bool,
    device: torch.device = _HOST,
) -> Forecast:
    """The forecast of a job with this pass at its end. `untied`: the head is a table of its own."""
    d = source.description
    weights = sum(out * width for out, width in map(source.shape, source.layer_linears()))
    head = d.vocab_size * d.hidden_size
    tokens = plan.options.sequences * length
    taught = plan.taught(sequences) * length
    graphs = graph_bytes(source, tokens)
    passes = _PASSES if graphs <= KEPT_BYTES else _PASSES + 1
    operations = 2.0 * (plan.steps * tokens * (passes * weights + _LIKELY * 4 * head) + taught * weights)
    operations += more_operations(weights, plan.steps) if plan.trains else 0
    seconds = operations / operations_per_second(device)
    block = 4 * weights // source.num_blocks
    entering = 4 * tokens * d.hidden_size * (source.num_blocks + 1)
    activations = graphs if graphs <= KEPT_BYTES else graphs // source.num_blocks
    held: float = 2 * weights + 6 * block + entering + activations + 4 * taught * d.hidden_size
    # Embedding, head, the float model's head, and the rows of both heads that are compared; logits; the mixed head.
    held += (4 * (3 if untied else 2) + 2 * 4 * _LIKELY) * head + LOGIT_BYTES * d.vocab_size
    held += (4 * head if untied else 0) + 16 * d.hidden_size**2  # the mixing before the head and how it is learned
    more = more_bytes(weights) if plan.trains else 0
    needed = int(held) + more
    stored = 2 * (4 if untied else 2) * head  # tables of 16 bits, as they were and as they will be
    on_device = 0 if device.type == "cpu" else needed
    return replace(
        forecast,
        seconds=forecast.seconds + seconds,
        memory_bytes=max(forecast.memory_bytes, resident_bytes() + needed + stored),
        device_bytes=max(forecast.device_bytes, on_device),
        disk_bytes=forecast.disk_bytes + 2 * weights + 2 * more,
    )


def save_raw(workspace: Workspace, index: int, block: QuantizedBlock, residuals: Mapping[str, Tensor]) -> None:
    """`residuals`: what rounding left of each matrix, where codes will be trained."""
    tensors: dict[str, Tensor] = {f"float|{name}": value for name, value in block.floats.items()}
    tensors |= {f"{_RESIDUAL}|{name}": value.cpu().half() for name, value in residuals.items()}
    plain: dict[str, Any] = {}
    for name, matrix in block.matrices.items():
        for part in _PARTS:
            if (value := getattr(matrix, part)) is not None:
                tensors[f"{part}|{name}"] = value.clone()  # parts of one stack share memory
        plain[name] = {
            "scheme": asdict(matrix.scheme),
            "global_scale": matrix.global_scale,
            "input_scale": matrix.input_scale,
            "rotation_seed": matrix.rotation_seed,
        }
    described = {
        "matrices": plain,
        "linears": sorted(block.linears),
        "kept": sorted(block.kept),
        "of_states": sorted(block.of_states),
        "errors": dict(block.errors),
    }
    workspace.save(workspace.raw(index), tensors, {"block": json.dumps(described)})


def load_raw(workspace: Workspace, index: int) -> tuple[QuantizedBlock, dict[str, Tensor]]:
    """(the block, its residuals)."""
    path = workspace.raw(index)
    with safe_open(path, "pt") as file:
        described: dict[str, Any] = json.loads(file.metadata()["block"])
    tensors = load_file(path)
    matrices = {}
    for name, plain in described["matrices"].items():
        parts = {part: tensors.get(f"{part}|{name}") for part in _PARTS}
        matrices[name] = QuantizedMatrix(**{**plain, **parts, "scheme": Scheme(**plain["scheme"])})
    floats = {name.removeprefix("float|"): value for name, value in tensors.items() if name.startswith("float|")}
    names = {key: frozenset(described[key]) for key in ("linears", "kept", "of_states")}
    residuals = {name: tensors[key] for name in matrices if (key := f"{_RESIDUAL}|{name}") in tensors}
    return QuantizedBlock(matrices, floats, errors=described["errors"], **names), residuals


def tune_blocks(model: TunedModel, sequences: Tensor, plan: LastPass) -> dict[str, Any]:
    """Tune or train all finished blocks and the final norm, and write them again; what that gained."""
    source, workspace = model.source, model.workspace
    raw = [load_raw(workspace, index) for index in range(source.num_blocks)]
    students = [_student(*each, model.device) for each in raw]
    edges = load_file(workspace.edges)
    embedding = edges[f"{EMBEDDING}.weight"].to(model.device).float()
    stored_head = edges.get(f"{HEAD}.weight")
    final_norm = f"{source.final_norm}.weight"
    pass_ = EndToEnd(
        source,
        students,
        _spaced(sequences, plan.taught(len(sequences))),
        embedding,
        embedding if stored_head is None else stored_head.to(model.device).float(),
        edges[final_norm].to(model.device).float() + model.norm_offset,
        head_alone=stored_head is not None,
    )
    report = pass_.run(plan.options, KeptTraining(workspace) if plan.trains else None)
    moved = total = 0
    for index, ((block, _), student) in enumerate(zip(raw, students, strict=True)):
        matrices, errors, changed = _finished(student)
        tuned = replace(
            block,
            matrices=matrices,
            floats={**block.floats, **_scaled_norms(student)},
            errors={**block.errors, **errors},
        )
        tensors, layers = encode_block(tuned, model.file_format, model.dtype, model.norm_offset)
        tensors |= scales_among(load_file(workspace.block(index)))
        workspace.save_block(index, tensors, to_plain(layers))
        moved, total = moved + changed, total + sum(matrix.codes.numel() for matrix in matrices.values())
    factors = pass_.norm_factors.to(_HOST)
    norm = stored_norm((edges[final_norm].float() + model.norm_offset) * factors, model.norm_offset)
    edges[final_norm] = narrow(final_norm, norm, model.dtype)
    if stored_head is not None and report.kept:
        edges[f"{HEAD}.weight"] = narrow(HEAD, pass_.mixed_head().to(_HOST), model.dtype)
    workspace.save(workspace.edges, edges)
    gained = {"steps": plan.steps, **asdict(report)}
    return {"trained": {**gained, "moved": moved / total}} if plan.trains else {"tuned": gained}


def _student(block: QuantizedBlock, residuals: Mapping[str, Tensor], device: torch.device) -> Student:
    floats = {name: value.to(device) for name, value in block.floats.items()}
    norms = {
        name: torch.ones_like(value)
        for name, value in floats.items()
        if value.dim() == 1 and name.endswith("norm") and name not in block.of_states
    }
    matrices: dict[str, Tunable] = {}
    for name, matrix in block.matrices.items():
        matrix = matrix.to(device)
        residual = residuals.get(name)
        matrices[name] = ScaledMatrix(matrix) if residual is None else TrainedCodes(matrix, residual.to(device))
    return Student(matrices, floats, norms)


def _finished(student: Student) -> tuple[dict[str, QuantizedMatrix], dict[str, float], int]:
    """(matrices, the errors of those that were trained, how many codes moved)."""
    matrices: dict[str, QuantizedMatrix] = {}
    errors: dict[str, float] = {}
    moved = 0
    for name, each in student.matrices.items():
        if isinstance(each, TrainedCodes):
            result = each.finish()
            matrices[name], errors[name] = result.matrix.to(_HOST), result.error
            moved += result.moved
        elif isinstance(each, ScaledMatrix):
            matrices[name] = each.finish().to(_HOST)
    return matrices, errors, moved


def _scaled_norms(student: Student) -> dict[str, Tensor]:
    return {name: (student.floats[name] * factors).to(_HOST) for name, factors in student.norms.items()}


def _spaced(sequences: Tensor, count: int) -> Tensor:
    return sequences[torch.arange(count) * sequences.shape[0] // count]
