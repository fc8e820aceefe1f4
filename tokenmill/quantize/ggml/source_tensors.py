"""The tensors of any checkpoint as a GGUF stores them: names, shapes, rows as float32 in GGUF's order, some at a time.

Matrices are read through the engine's weight formats; llama's q and k rows are reordered and Gemma's norms get their
one added on the way. Tensors that the source already has in the target type are copied as bytes.
Knows nothing of mixes or files. Used by export.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tokenmill.checkpoint import gguf_latent
from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.gguf import GGUFCheckpoint
from tokenmill.checkpoint.gguf_export import ExportedTensor, export_tensors, rope_divisors
from tokenmill.checkpoint.hf_export import to_gguf_layout
from tokenmill.model.architectures import architecture_of
from tokenmill.model.reader import WeightReader
from tokenmill.quantize.ggml.blocks import dequantize

_VALUES_AT_ONCE = 1 << 22  # 16 MiB of float32: what a large matrix adds to the memory in use
_NO_POSITIONS = 1  # rotary tables are not needed to read weights


class SourceTensors:
    def __init__(self, checkpoint: Checkpoint, untied_output: bool = False) -> None:
        self.checkpoint = checkpoint
        self.description = checkpoint.description
        reader = WeightReader(checkpoint)
        architecture_of(self.description)(reader, self.description, _NO_POSITIONS)
        reader.finish()
        self._weights = reader.weights
        self._parts = reader.tensor_names
        self.tensors = export_tensors(checkpoint, self._shapes(), untied_output)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every matrix and vector, in the order of the file."""
        prefix_of = {part: prefix for prefix, parts in self._parts.items() for part in parts}
        shapes: dict[str, tuple[int, ...]] = {}
        for name in self.checkpoint.names():
            if (prefix := prefix_of.get(name)) is not None:
                weight = self._weights[prefix]
                shapes[f"{prefix}.weight"] = (weight.out_features, weight.in_features)
            else:
                shapes[name] = self.checkpoint.tensor(name).shape
        return shapes

    def is_same(self, tensor: ExportedTensor, type_name: str) -> bool:
        """Whether the source holds this tensor in this type, so that its bytes can be copied."""
        prefix = tensor.source.removesuffix(".weight")
        if not isinstance(self.checkpoint, GGUFCheckpoint) or prefix not in self._weights:
            return False
        return self._weights[prefix].type_name == type_name

    def stored_rows(self, tensor: ExportedTensor) -> Iterator[Tensor]:
        """The bytes of a tensor for which `is_same`, some rows at a time."""
        data = self.checkpoint.tensor(tensor.source).data.contiguous().view(torch.uint8)
        yield from data.split(self._rows_at_once(tensor.shape))
        self.checkpoint.release(tensor.source)

    def float_rows(self, tensor: ExportedTensor) -> Iterator[Tensor]:
        """float32 [rows, in], some rows at a time; a vector comes as one row."""
        if not tensor.source:
            yield torch.tensor(rope_divisors(self.description)).view(1, -1)
            return
        prefix = tensor.source.removesuffix(".weight")
        if prefix not in self._weights:
            vector = self.checkpoint.tensor(tensor.source).data.float()
            yield to_gguf_layout(tensor.source, vector, self.description).reshape(1, -1)
            return
        weight = self._weights[prefix]
        if len(tensor.shape) == 3 and prefix.endswith(".kv_b_proj"):  # its rows are spread over two stacks
            yield gguf_latent.stack(tensor.name, weight.dequantize(0, weight.out_features), self.description)
            return
        step = self._rows_at_once(tensor.shape)
        for begin in range(0, weight.out_features, step):
            end = min(begin + step, weight.out_features)
            if weight.format_name == "ggml":
                rows = dequantize(weight.type_name, weight.parts()["blocks"][begin:end])
            else:
                rows = weight.dequantize(begin, end)
            yield to_gguf_layout(tensor.source, rows, self.description)
        for part in self._parts[prefix]:
            self.checkpoint.release(part)

    def _rows_at_once(self, shape: tuple[int, ...]) -> int:
        """A multiple of a head, so that its rows can be reordered."""
        head = self.description.head_dim
        return max(1, _VALUES_AT_ONCE // (shape[-1] * head)) * head
