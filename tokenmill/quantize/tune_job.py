"""The end-to-end pass inside a job: blocks as their solvers left them, tuned together, written again.

Solvers hand over codes and scales, which formats pack away; so a job that will tune keeps both of each block in its
workspace (`raw` files), from which a killed pass begins again. The arithmetic is in tune.py.
"""

from __future__ import annotations

import json
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
from tokenmill.quantize.source import EMBEDDING, HEAD, SourceModel, narrow, stored_norm
from tokenmill.quantize.tune import KEPT_BYTES, EndToEnd, Student, TuneOptions, TuneReport, graph_bytes
from tokenmill.quantize.workspace import Workspace

_HOST = torch.device("cpu")
_PARTS = ("codes", "scales", "zeros", "table")
_PASSES = 5.5  # a step's cost in forward passes of its tokens: one down, two back, and what are no products
_LIKELY = 1 / 6  # share of a vocabulary that a text makes likely
_SEQUENCES = 256  # calibration sequences that steps draw from, at most


class ScaledMatrix:
    """A QuantizedMatrix whose float scales are learned; scales that are powers of two or float8 stay."""

    def __init__(self, matrix: QuantizedMatrix) -> None:
        self.matrix = matrix
        free = matrix.scheme.scale_type == "float" and matrix.rotation_seed is None
        self.factors = [torch.ones_like(matrix.scales)] if free else []

    def weight(self) -> Tensor:
        if not self.factors:
            return self.matrix.dequantize()
        scales = self.matrix.scales * self.factors[0]
        return element_values(self.matrix) * (spread(scales, self.matrix) * self.matrix.global_scale)

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


def with_tuning(
    forecast: Forecast, source: SourceModel, steps: int, sequences: int, length: int, device: torch.device = _HOST
) -> Forecast:
    """The forecast of a job with this pass at its end."""
    d = source.description
    weights = sum(out * width for out, width in map(source.shape, source.layer_linears()))
    head = d.vocab_size * d.hidden_size
    options = TuneOptions(steps)
    tokens = options.sequences * length
    taught = min(sequences, _SEQUENCES) * length
    graphs = graph_bytes(source, tokens)
    passes = _PASSES if graphs <= KEPT_BYTES else _PASSES + 1
    operations = 2.0 * (steps * tokens * (passes * weights + _LIKELY * 4 * head) + taught * weights)
    seconds = operations / operations_per_second(device)
    block = 4 * weights // source.num_blocks
    entering = 4 * tokens * d.hidden_size * (source.num_blocks + 1)
    activations = graphs if graphs <= KEPT_BYTES else graphs // source.num_blocks
    held = 2 * weights + 8 * head + 6 * block + entering + activations + 4 * taught * d.hidden_size
    on_device = 0 if device.type == "cpu" else held
    return replace(
        forecast,
        seconds=forecast.seconds + seconds,
        memory_bytes=max(forecast.memory_bytes, resident_bytes() + held),
        device_bytes=max(forecast.device_bytes, on_device),
        disk_bytes=forecast.disk_bytes + 2 * weights,
    )


def save_raw(workspace: Workspace, index: int, block: QuantizedBlock) -> None:
    tensors: dict[str, Tensor] = {f"float|{name}": value for name, value in block.floats.items()}
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


def load_raw(workspace: Workspace, index: int) -> QuantizedBlock:
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
    return QuantizedBlock(matrices, floats, errors=described["errors"], **names)


def tune_blocks(model: TunedModel, sequences: Tensor, steps: int) -> TuneReport:
    """Tune all finished blocks and the final norm, and write them again."""
    source, workspace = model.source, model.workspace
    raw = [load_raw(workspace, index) for index in range(source.num_blocks)]
    students = [_student(block, model.device) for block in raw]
    edges = load_file(workspace.edges)
    embedding = edges[f"{EMBEDDING}.weight"].to(model.device).float()
    stored_head = edges.get(f"{HEAD}.weight")
    final_norm = f"{source.final_norm}.weight"
    chosen = _spaced(sequences)
    pass_ = EndToEnd(
        source,
        students,
        chosen,
        embedding,
        embedding if stored_head is None else stored_head.to(model.device).float(),
        edges[final_norm].to(model.device).float() + model.norm_offset,
    )
    report = pass_.run(TuneOptions(steps))
    for index, (block, student) in enumerate(zip(raw, students, strict=True)):
        tuned = replace(block, matrices=_finished(student), floats={**block.floats, **_scaled_norms(student)})
        tensors, layers = encode_block(tuned, model.file_format, model.dtype, model.norm_offset)
        workspace.save_block(index, tensors, to_plain(layers))
    factors = pass_.norm_factors.to(_HOST)
    norm = stored_norm((edges[final_norm].float() + model.norm_offset) * factors, model.norm_offset)
    edges[final_norm] = narrow(final_norm, norm, model.dtype)
    workspace.save(workspace.edges, edges)
    return report


def _student(block: QuantizedBlock, device: torch.device) -> Student:
    floats = {name: value.to(device) for name, value in block.floats.items()}
    norms = {
        name: torch.ones_like(value)
        for name, value in floats.items()
        if value.dim() == 1 and name.endswith("norm") and name not in block.of_states
    }
    return Student({name: ScaledMatrix(matrix.to(device)) for name, matrix in block.matrices.items()}, floats, norms)


def _finished(student: Student) -> dict[str, QuantizedMatrix]:
    matrices = ((name, each) for name, each in student.matrices.items() if isinstance(each, ScaledMatrix))
    return {name: each.finish().to(_HOST) for name, each in matrices}


def _scaled_norms(student: Student) -> dict[str, Tensor]:
    return {name: (student.floats[name] * factors).to(_HOST) for name, factors in student.norms.items()}


def _spaced(sequences: Tensor) -> Tensor:
    count = min(_SEQUENCES, sequences.shape[0])
    return sequences[torch.arange(count) * sequences.shape[0] // count]
