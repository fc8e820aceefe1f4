"""The tensors of any checkpoint as a GGUF stores them: names, shapes, rows as float32 in GGUF's order, some at a time.

Matrices are read through the engine's weight formats; llama's q and k rows are reordered and Gemma's norms get their
one added on the way. Tensors that the source already has in the target type are copied as bytes.
Knows nothing of mixes or files. Used by export.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from tokenmill.checkpoint import gguf_hybrid, gguf_latent
from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.gguf import GGUFCheckpoint
from tokenmill.checkpoint.gguf_export import ExportedTensor, derived_tensors, export_tensors
from tokenmill.checkpoint.hf_export import exported_description, to_gguf_layout
from tokenmill.model.architectures import architecture_of
from tokenmill.model.reader import WeightReader
from tokenmill.quantize.ggml.blocks import dequantize
from tokenmill.quantize.ggml.expert_tensors import ExpertTensors

_VALUES_AT_ONCE = 1 << 22  # 16 MiB of float32: what a large matrix adds to the memory in use
_NO_POSITIONS = 1  # rotary tables are not needed to read weights


class RowQueue:
    """Rows that are written some at a time, in step with others."""

    def __init__(self, rows: Tensor) -> None:
        self._rows, self._taken = rows, 0

    def take(self, count: int) -> Tensor:
        self._taken += count
        return self._rows[self._taken - count : self._taken].contiguous()


class SourceTensors:
    def __init__(self, checkpoint: Checkpoint, untied_output: bool = False) -> None:
        self.checkpoint = checkpoint
        self.description = checkpoint.description
        reader = WeightReader(checkpoint)
        self._experts = ExpertTensors.of(architecture_of(self.description)(reader, self.description, _NO_POSITIONS))
        reader.finish()
        self._weights = reader.weights
        self._names = {id(weight): prefix for prefix, weight in reader.weights.items()}
        self._parts = reader.tensor_names
        self.tensors = export_tensors(checkpoint, self._shapes(), untied_output)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every matrix and vector, in the order of the file."""
        prefix_of = {part: prefix for prefix, parts in self._parts.items() for part in parts}
        shapes: dict[str, tuple[int, ...]] = {}
        for name in self.checkpoint.names():
            if self._experts.owns(name):
                continue
            if (prefix := prefix_of.get(name)) is not None:
                weight = self._weights[prefix]
                shapes[f"{prefix}.weight"] = (weight.out_features, weight.in_features)
            else:
                shapes[name] = self.checkpoint.tensor(name).shape
        return shapes | self._experts.shapes()

    def sources(self, tensor: ExportedTensor) -> list[str]:
        """The names of what a tensor is made of: one matrix or vector, those that the file joins, or all experts'."""
        experts = self._experts.matrices.get(tensor.source.removesuffix(".weight"), [])
        return [f"{self._names[id(weight)]}.weight" for weight in experts] or [tensor.source, *tensor.rest]

    def is_same(self, tensor: ExportedTensor, type_name: str) -> bool:
        """Whether the source holds this tensor in this type, so that its bytes can be copied."""
        if not isinstance(self.checkpoint, GGUFCheckpoint) or tensor.source not in self.checkpoint:
            return False
        if tensor.rest or tensor.rows:
            return False
        if gguf_latent.is_joined(tensor.source):  # the file gets its two stacks
            return False
        prefixes = [name.removesuffix(".weight") for name in self.sources(tensor)]
        return all(prefix in self._weights and self._weights[prefix].type_name == type_name for prefix in prefixes)

    def stored_rows(self, tensor: ExportedTensor) -> Iterator[Tensor]:
        """The bytes of a tensor for which `is_same`, some rows at a time."""
        data = self.checkpoint.tensor(tensor.source).data.contiguous().view(torch.uint8)
        yield from data.split(self._rows_at_once(tensor.shape))
        self.checkpoint.release(tensor.source)

    def packed_rows(self, tensor: ExportedTensor, packed: Mapping[str, Tensor]) -> RowQueue | None:
        """The bytes of a tensor whose linears are all in `packed`, in GGUF's order of rows; else None."""
        names = self.sources(tensor) if tensor.source else []
        prefixes = [name.removesuffix(".weight") for name in names]
        if not names or tensor.rows or any(prefix not in packed for prefix in prefixes):
            return None
        multiplied = gguf_hybrid.without_multipliers(self.description) != self.description
        if gguf_latent.is_joined(tensor.source) or multiplied:
            return None  # the file has other numbers than the model computes with
        described = exported_description(self.checkpoint)
        return RowQueue(torch.cat([to_gguf_layout(f"{name}.weight", packed[name], described) for name in prefixes]))

    def float_rows(self, tensor: ExportedTensor) -> Iterator[tuple[int, Tensor]]:
        """(which of `sources`, float32 [rows, in]), some rows at a time; a vector comes as one row."""
        if not tensor.source:
            yield 0, torch.tensor(derived_tensors(self.description)[tensor.name]).view(1, -1)
            return
        for number, source in enumerate(self.sources(tensor)):
            for rows in self._float_rows(source, tensor):
                yield number, rows

    def _float_rows(self, source: str, tensor: ExportedTensor) -> Iterator[Tensor]:
        prefix = source.removesuffix(".weight")
        if prefix not in self._weights:
            vector = self._experts.vectors.get(source)
            vector = self.checkpoint.tensor(source).data.float() if vector is None else vector
            vector = gguf_hybrid.multiplied(source, vector, 0, self.description)
            yield to_gguf_layout(source, vector, self.description).reshape(1, -1)
            return
        weight = self._weights[prefix]
        if gguf_latent.is_joined(source):  # its rows are spread over two stacks
            yield gguf_latent.stack(tensor.name, weight.dequantize(0, weight.out_features), self.description)
            return
        step = self._rows_at_once(tensor.shape)
        for first, last in tensor.rows or ((0, weight.out_features),):
            for begin in range(first, last, step):
                end = min(begin + step, last)
                if weight.format_name == "ggml":
                    rows = dequantize(weight.type_name, weight.parts()["blocks"][begin:end])
                else:
                    rows = weight.dequantize(begin, end)
                rows = gguf_hybrid.multiplied(source, rows, begin, self.description)
                yield to_gguf_layout(source, rows, self.description)
        for part in self._parts[prefix]:
            self.checkpoint.release(part)

    def _rows_at_once(self, shape: tuple[int, ...]) -> int:
        """A multiple of a head, so that its rows can be reordered."""
        head = self.description.head_dim or 1
        return max(1, _VALUES_AT_ONCE // (shape[-1] * head)) * head
