"""Reads a checkpoint for an architecture and records which tensors are missing or left over.

Architectures read by canonical name and expected shape; the format of each matrix is detected from its tensors.
Problems are collected and raised together by `finish`, so that one error names them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.checkpoint.base import Checkpoint, StoredTensor
from tokenmill.checkpoint.description import ModelDescription
from tokenmill.errors import CheckpointError
from tokenmill.log import get_logger
from tokenmill.model.formats import FORMATS
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.formats.dense import DenseWeight

if TYPE_CHECKING:
    from torch import Tensor

    from tokenmill.model.formats.stacks import ExpertStacks

_log = get_logger(__name__)
# Buffers that some exporters store with the weights; they are computed, not read.
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
# Calibrated scales of a quantized KV cache: read by model/kvstore/checkpoint_scales.py, for fp8 pages only.
_KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point")
_MAX_SHOWN = 6


class WeightReader:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.weights: dict[str, LinearWeight] = {}
        self.tensor_names: dict[str, list[str]] = {}  # of each weight
        self._used: set[str] = set()
        self._prefixes: set[str] = set()  # of all names, made when first needed
        self._missing: list[str] = []
        self._misshapen: list[str] = []

    @property
    def description(self) -> ModelDescription:
        """What the architecture is built from."""
        return self.checkpoint.description

    def own(self, values: np.ndarray) -> Any:
        """Values that were computed rather than read, as the arrays of this model are."""
        import torch

        return torch.from_numpy(values)

    def format_names(self) -> Iterable[str]:
        """Of FORMATS, those that are tried."""
        return FORMATS

    def _absent(self, *shape: int) -> Tensor:
        """In the place of a tensor that is missing: `finish` raises."""
        import torch

        return torch.empty(shape, device="meta")

    def vector(self, name: str, size: int, offset: float = 0.0) -> Tensor:
        """A small float vector (a norm or a bias) as float32, plus `offset`. Norms of heads may be stored as a matrix
        with a row for each head."""
        stored = self._take(name)
        if stored is None:
            return self._absent(size)
        if stored.shape != (size,) and not (len(stored.shape) == 2 and math.prod(stored.shape) == size):
            self._misshapen.append(f"{name} is {list(stored.shape)}, expected [{size}]")
        return self.floats(stored).flatten() + offset

    def table(self, name: str, rows: int, columns: int) -> Tensor:
        """A small float matrix that is looked up, not multiplied, as float32."""
        stored = self._take(name)
        if stored is None:
            return self._absent(rows, columns)
        if stored.shape != (rows, columns):
            self._misshapen.append(f"{name} is {list(stored.shape)}, expected [{rows}, {columns}]")
        return self.floats(stored)

    def floats(self, stored: StoredTensor) -> Tensor:
        """Its values as float32, where it has a plain float type."""
        if not stored.data.dtype.is_floating_point:
            self._misshapen.append(f"{stored.name} has type {stored.type_name}, expected a plain float type")
        return stored.data.float()

    def array(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A small float array that is no matrix product (a convolution, decays of a state) as float32."""
        stored = self._take(name)
        if stored is None:
            return self._absent(*shape)
        if stored.shape != shape:
            self._misshapen.append(f"{name} is {list(stored.shape)}, expected {list(shape)}")
            return self._absent(*shape)
        return self.floats(stored)

    def optional_vector(self, name: str, size: int) -> Tensor | None:
        return self.vector(name, size) if name in self.checkpoint else None

    def linear(self, prefix: str, out_features: int, in_features: int, bias: bool = False) -> LinearWeight:
        """The matrix `prefix` [out, in], in whatever format its tensors are."""
        for name in self.format_names():
            names = FORMATS.get(name).tensor_names(self.checkpoint, prefix)
            if names:
                weight: LinearWeight = FORMATS.get(name).load(self.checkpoint, prefix)
                self._used.update(names)
                self.tensor_names[prefix] = names
                break
        else:
            weight = self._unreadable(prefix, out_features, in_features)
        if (weight.out_features, weight.in_features) != (out_features, in_features):
            self._misshapen.append(
                f"{prefix} is [{weight.out_features}, {weight.in_features}], expected [{out_features}, {in_features}]"
            )
        # GPTQ files may add a bias that the architecture does not have.
        if bias or (hasattr(weight, "decode") and f"{prefix}.bias" in self.checkpoint):
            weight.bias = self.vector(f"{prefix}.bias", out_features)
        self.weights[prefix] = weight
        return weight

    def tied_head(self, embedding: LinearWeight) -> LinearWeight:
        """The head of a model that has no matrix for it but the embedding."""
        self.ignore("lm_head.weight")
        return embedding

    def experts(self, prefix: str, stacks: ExpertStacks) -> ExpertStacks:  # noqa: ARG002
        """What is kept of the experts that were read below `prefix`."""
        return stacks

    def tensor(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """A tensor of several matrices, as of all experts, in its stored form; a meta tensor if it does not fit."""
        stored = self._take(name)
        if stored is not None and stored.shape == shape:
            return stored
        if stored is not None:
            self._misshapen.append(f"{name} is {list(stored.shape)}, expected {list(shape)}")
        return StoredTensor(name, shape, "F32", self._absent(*shape))

    def add(self, prefix: str, weight: LinearWeight, tensor_names: list[str]) -> LinearWeight:
        """Record a matrix that was made from a part of a larger tensor. `tensor_names`: released with this matrix."""
        self.weights[prefix] = weight
        self.tensor_names[prefix] = tensor_names
        return weight

    def row(self, prefix: str, size: int) -> LinearWeight:
        """A matrix of one row, kept in float32; files may store it as a vector."""
        values = self.vector(f"{prefix}.weight", size).reshape(1, size)
        return self.add(prefix, DenseWeight(StoredTensor(prefix, (1, size), "F32", values)), [])

    def has_prefix(self, prefix: str) -> bool:
        """Whether there is a tensor PREFIX.something."""
        if not self._prefixes:
            for name in self.checkpoint.names():
                parts = name.split(".")
                self._prefixes.update(".".join(parts[:end]) for end in range(1, len(parts)))
        return prefix in self._prefixes

    def first_prefix(self, prefixes: Sequence[str]) -> str:
        """The first of these that any tensor has; the first of all if there is none."""
        return next(filter(self.has_prefix, prefixes), prefixes[0])

    def ignore(self, name: str) -> None:
        """A tensor that may be present and is not needed."""
        self._used.add(name)

    def finish(self) -> None:
        """Raise one error that names every missing, misshapen or leftover tensor."""
        d = self.checkpoint.description
        drafts = tuple(f"model.layers.{d.num_layers + number}." for number in range(d.draft_layers))
        left = [
            name
            for name in self.checkpoint.names()
            if name not in self._used and not name.endswith(_DERIVED_SUFFIXES) and not name.startswith(drafts)
        ]
        num_kv_scales = sum(name.endswith(_KV_SCALES) for name in left)
        if num_kv_scales:
            _log.info("the file has %d scales of a quantized KV cache: for --kv-cache-dtype fp8 only", num_kv_scales)
            left = [name for name in left if not name.endswith(_KV_SCALES)]
        problems = [
            f"{label}: {', '.join(names[:_MAX_SHOWN])}"
            + (f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else "")
            for label, names in (
                ("missing tensors", self._missing),
                ("tensors of the wrong shape", self._misshapen),
                ("tensors this architecture does not use", sorted(left)),
            )
            if names
        ]
        if problems:
            raise CheckpointError(
                f"{self.checkpoint.path} does not fit architecture {self.checkpoint.description.architecture}: "
                + "; ".join(problems),
                "the file is incomplete or its config describes another model; fetch it again or correct the config",
            )

    def _take(self, name: str) -> StoredTensor | None:
        if name not in self.checkpoint:
            self._missing.append(name)
            return None
        self._used.add(name)
        return self.checkpoint.tensor(name)

    def _unreadable(self, prefix: str, out_features: int, in_features: int) -> LinearWeight:
        name = f"{prefix}.weight"
        stored = [other for other in self.checkpoint.names() if other.startswith(f"{prefix}.")]
        if name not in self.checkpoint and stored:
            self._used.update(stored)
            self._misshapen.append(f"{prefix} is stored as {', '.join(stored)}, which no format reads")
        elif name in self.checkpoint:
            self._used.add(name)
            self._misshapen.append(f"{name} has type {self.checkpoint.tensor(name).type_name}, which no format reads")
        else:
            self._missing.append(name)
        shape = (out_features, in_features)
        return DenseWeight(StoredTensor(name, shape, "F32", self._absent(*shape)))
