"""A checkpoint to a quantized GGUF: plan the file, then stream it tensor by tensor in constant memory.

The plan (types, sizes, metadata) needs no weights, so size and disk are checked before any work. Each tensor's error is
measured as it is written. The file appears complete or not at all. Called by the quantization job for `--format gguf`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.gguf_export import ExportedTensor, export_metadata
from tokenmill.checkpoint.gguf_writer import GGUFWriter, TensorSlot, file_bytes, pack_value
from tokenmill.errors import UserError
from tokenmill.kernels.ggml_types import TYPES
from tokenmill.log import get_logger
from tokenmill.quantize.ggml.blocks import PLAIN, dequantize, quantize
from tokenmill.quantize.ggml.mixes import Mix, Shape, choose_types, find_mix, is_quantized
from tokenmill.quantize.ggml.source_tensors import SourceTensors

Progress = Callable[[int, int, str], None]  # (weights done, weights in all, tensor)

_log = get_logger(__name__)
_HEAD, _EMBEDDING = "lm_head", "model.embed_tokens"


@dataclass(frozen=True, slots=True)
class TensorReport:
    name: str  # in the file
    type_name: str
    shape: tuple[int, ...]
    nbytes: int
    relative_error: float  # root of (squared error / squared weights); 0 for what is copied or stays float32
    is_copied: bool  # bytes copied from the source


@dataclass(frozen=True, slots=True)
class GGUFReport:
    path: Path
    mix: str
    nbytes: int
    bits_per_weight: float  # of the matrices
    seconds: float
    tensors: tuple[TensorReport, ...]
    without_importance: tuple[str, ...]  # matrices that had no importance although others did


@dataclass(frozen=True, slots=True, eq=False)
class GGUFPlan:
    mix: Mix
    source: SourceTensors
    pairs: dict[str, bytes]
    slots: list[TensorSlot]

    @property
    def nbytes(self) -> int:
        return file_bytes(self.pairs, self.slots)

    @property
    def num_weights(self) -> int:
        return sum(math.prod(slot.shape) for slot in self.slots)

    @property
    def bits_per_weight(self) -> float:
        matrices = [slot for slot in self.slots if is_quantized(slot.name, slot.shape)]
        return 8 * sum(slot.nbytes for slot in matrices) / sum(math.prod(slot.shape) for slot in matrices)


def plan_gguf(
    checkpoint: Checkpoint,
    mix_name: str,
    num_importances: int = 0,
    untied_output: bool = False,
    types: Mapping[str, str] | None = None,
) -> GGUFPlan:
    """The plan of the file; reads no weights. `num_importances`: how many matrices have an importance. `types`: of
    tensors that get another type than the mix says."""
    mix, source = find_mix(mix_name), SourceTensors(checkpoint, untied_output)
    pairs = export_metadata(checkpoint, mix.file_type)
    if num_importances:
        pairs["quantize.imatrix.entries_count"] = pack_value(num_importances)
    slots = plan_slots(source, mix, num_importances > 0)
    if types:
        slots = [replace(slot, type_name=types.get(slot.name, slot.type_name)) for slot in slots]
    return GGUFPlan(mix, source, pairs, slots)


def plan_slots(source: SourceTensors, mix: Mix, has_importance: bool) -> list[TensorSlot]:
    """The tensors of the file with their types."""
    description = source.description
    shapes = {tensor.name: tensor.shape for tensor in source.tensors}
    model = Shape(
        description.num_layers,
        description.num_heads,
        description.num_kv_heads,
        has_output="output.weight" in shapes,
        has_importance=has_importance,
    )
    types = choose_types(mix, shapes, model)
    return [TensorSlot(name, shape, types[name]) for name, shape in shapes.items()]


def quantize_gguf(
    checkpoint: Checkpoint,
    path: Path,
    mix_name: str,
    importance: Mapping[str, Tensor] | None = None,
    progress: Progress = lambda _done, _all, _name: None,
    untied_output: bool = False,
    types: Mapping[str, str] | None = None,
    packed: Mapping[str, Tensor] | None = None,
) -> GGUFReport:
    """Write `path`. `importance`: mean square of the input of each linear, by its canonical prefix. `types`: as in
    `plan_gguf`. `packed`: bytes [out, bytes per row] of linears that are quantized already, in Hugging Face's rows."""
    started = time.monotonic()
    importance = importance or {}
    plan = plan_gguf(checkpoint, mix_name, len(importance), untied_output, types)
    _report_types(plan)
    if plan.mix.is_low_bit and plan.mix.default.startswith("IQ") and not importance:
        _log.warning("%s: without an importance (--method imatrix) few bits lose much more", plan.mix.name)
    reports, without, done = [], [], 0
    with GGUFWriter(path, plan.pairs, plan.slots) as writer:
        for tensor, slot in zip(plan.source.tensors, plan.slots, strict=True):
            progress(done, plan.num_weights, slot.name)
            weights = _importances_of(plan.source, tensor, importance)
            if importance and any(each is None for each in weights) and slot.type_name not in PLAIN:
                without.append(slot.name)
            reports.append(_write_tensor(plan.source, tensor, slot, weights, packed or {}, writer))
            done += math.prod(slot.shape)
    progress(done, plan.num_weights, "")
    lacking = [name for name in without if name.startswith("blk.")]  # the edges are usually not calibrated
    if lacking:
        _log.warning("%s: no importance for %s: weighted uniformly", path.name, ", ".join(lacking))
    return GGUFReport(
        path,
        plan.mix.name,
        writer.nbytes,
        plan.bits_per_weight,
        time.monotonic() - started,
        tuple(reports),
        tuple(without),
    )


def _write_tensor(
    source: SourceTensors,
    tensor: ExportedTensor,
    slot: TensorSlot,
    importances: list[Tensor | None],
    packed_of: Mapping[str, Tensor],
    writer: GGUFWriter,
) -> TensorReport:
    """`importances`: of each matrix that the tensor is made of."""
    if source.is_same(tensor, slot.type_name):
        for stored in source.stored_rows(tensor):
            writer.append(stored)
        return TensorReport(slot.name, slot.type_name, slot.shape, slot.nbytes, 0.0, is_copied=True)
    ready = source.packed_rows(tensor, packed_of)
    squared_error = squared_weights = 0.0
    for number, rows in source.float_rows(tensor):
        packed = _quantize_named(slot, rows, importances[number]) if ready is None else ready.take(rows.shape[0])
        writer.append(packed)
        if slot.type_name != "F32":
            difference = dequantize(slot.type_name, packed) - rows
            squared_error += float(torch.linalg.vector_norm(difference, dtype=torch.float64)) ** 2
            squared_weights += float(torch.linalg.vector_norm(rows, dtype=torch.float64)) ** 2
    if not math.isfinite(squared_error):
        raise UserError(
            f"{slot.name}: weights too large for the float16 scales of {slot.type_name}", "choose BF16 or F32"
        )
    error = math.sqrt(squared_error / squared_weights) if squared_weights else 0.0
    return TensorReport(slot.name, slot.type_name, slot.shape, slot.nbytes, error, is_copied=False)


def _quantize_named(slot: TensorSlot, rows: Tensor, importance: Tensor | None) -> Tensor:
    try:
        return quantize(slot.type_name, rows, importance)
    except UserError as error:
        raise UserError(f"{slot.name}: {error.problem}", error.remedy) from None


def _importances_of(
    source: SourceTensors, tensor: ExportedTensor, importance: Mapping[str, Tensor]
) -> list[Tensor | None]:
    """A tied embedding uses the head's importance, since it is multiplied as the head. The stack of latent attention's
    key projections is transposed: what its matrix was calibrated with is not its input."""
    if ".attn_k_b." in tensor.name:
        return [None]
    prefixes = [name.removesuffix(".weight") for name in source.sources(tensor)]
    if prefixes[0] == _EMBEDDING and tensor.name == "output.weight":
        prefixes = [_HEAD]
    return [importance.get(prefix) for prefix in importance_prefixes(prefixes, importance)]


def importance_prefixes(prefixes: list[str], importance: Mapping[str, Tensor]) -> list[str]:
    """Whose importance serves a tensor made of `prefixes`: of an embedding that was not calibrated, the head's."""
    return [_HEAD] if prefixes[0] == _EMBEDDING and _EMBEDDING not in importance else prefixes


def _report_types(plan: GGUFPlan) -> None:
    """Log the types of the tensors: rows that 256 does not divide fall back to other types than the mix names."""
    counts = Counter(slot.type_name for slot in plan.slots if is_quantized(slot.name, slot.shape))
    _log.info("%s: %s", plan.mix.name, ", ".join(f"{count} x {name}" for name, count in counts.most_common()))
    wide = sum(is_quantized(slot.name, slot.shape) and slot.shape[-1] % 256 != 0 for slot in plan.slots)
    if wide and TYPES[plan.mix.default].block_size == 256:
        _log.warning("%d matrices have rows that 256 does not divide: they get types with blocks of 32", wide)
