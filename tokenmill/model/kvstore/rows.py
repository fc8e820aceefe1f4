"""Stores whose pages are rows of bytes: one row per token and KV head, of a format for keys and one for values.

A `RowFormat` is the spec of its row in plain torch; where it also has a code of csrc/cpu/kv_rows.h, C++ writes and
reads the pages, in eager steps and in the recorded program. A store subclass only names its two formats. Used by every
quantized store but KIVI, whose keys are grouped over tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from hashlib import sha256
from itertools import islice
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.kernels.base import select
from tokenmill.kernels.cpu_pages import CpuPages, RowCode
from tokenmill.kernels.packed_pages import KeyTransform, PackedPages, PackedRows
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.kvstore.conditioning import KeyConditioning
from tokenmill.model.kvstore.rotation import Rotation

Rounder = Callable[[Tensor], tuple[Tensor, Tensor]]  # values [..., n] -> codes and the values they represent


class RowFormat(ABC):
    """How one token's key or value of one KV head becomes bytes."""

    rotation: Rotation | None = None
    conditioning: KeyConditioning | None = None
    feedback: Tensor | None = None
    weights: Tensor | None = None  # [kv_heads, head_dim], with feedback: the weight of a squared error

    def __init__(self, head_dim: int) -> None:
        if head_dim % 8:
            raise UserError(f"heads of {head_dim} values cannot be packed", "use --kv-cache-dtype float16")
        self.head_dim = head_dim

    @property
    @abstractmethod
    def row_bytes(self) -> int: ...

    @abstractmethod
    def to_rows(self, heads: Tensor) -> Tensor:
        """float32 [T, kv_heads, head_dim], rotated -> uint8 [T, kv_heads, row_bytes]."""

    @abstractmethod
    def from_rows(self, rows: Tensor) -> Tensor:
        """uint8 [pages, kv_heads, page_size, row_bytes] -> float32 [pages, kv_heads, page_size, head_dim], rotated."""

    def code(self) -> RowCode | None:
        """The format for C++, without rotation and conditioning; None if C++ does not support it."""
        return None

    @property
    def code_bytes(self) -> int:
        """Of the codes; a row's numbers follow them. Where the GPU kernels read pages these are two planes."""
        return self.row_bytes

    def packed(self, device: torch.device) -> PackedRows | None:  # noqa: ARG002
        """The format for the GPU kernels; None if they do not support it."""
        return None

    def constants(self) -> list[Tensor]:
        """Tensors needed to read rows that may differ between processes."""
        return [] if self.conditioning is None else [self.conditioning.center, self.conditioning.scale]

    def encode(self, heads: Tensor) -> Tensor:
        if self.conditioning is not None:
            heads = (heads - self.conditioning.center) * self.conditioning.scale
        return self.to_rows(heads if self.rotation is None else self.rotation.rotate(heads))

    def decode(self, rows: Tensor) -> Tensor:
        heads = self.from_rows(rows)
        if self.rotation is not None:
            heads = self.rotation.unrotate(heads)
        if self.conditioning is not None:
            heads = heads / self.conditioning.scale[:, None] + self.conditioning.center[:, None]
        return heads

    def conditioned(self, conditioning: KeyConditioning, feedback: bool = True) -> Self:
        """The same rows for the keys of one layer; rotated in any case. `feedback`: errors are compensated by the
        coordinates after them."""
        other = copy(self)
        other.rotation = self.rotation or Rotation(self.head_dim)
        other.conditioning = conditioning
        if feedback:
            other.feedback, other.weights = conditioning.feedback(other.rotation)
        return other

    def round(self, heads: Tensor, rounder: Rounder) -> tuple[Tensor, Tensor]:
        """Codes of all coordinates [T, kv_heads, head_dim], with feedback one after the other, and the weighted squared
        error."""
        if self.feedback is None or self.weights is None:
            codes, values = rounder(heads)
            return codes, (values - heads).square().sum(-1, keepdim=True)
        parts: list[Tensor] = []
        targets = heads.clone()
        cost = torch.zeros_like(heads[..., :1])
        for i in range(self.head_dim):
            target = targets[..., i : i + 1].clone()
            code, value = rounder(target)
            parts.append(code)
            cost += self.weights[:, i : i + 1] * (value - target).square()
            targets -= (value - heads[..., i : i + 1]) * self.feedback[:, :, i]
        return torch.cat(parts, -1), cost

    def bound(self) -> Any:
        """The C++ object of this format; None where there is none."""
        code = self.code()
        if code is None:
            return None
        conditioning = self.conditioning
        rotation = None if self.rotation is None else self.rotation.code()
        if conditioning is not None:
            code = replace(code, centers=conditioning.center, scales=conditioning.scale)
            code = replace(code, feedback=self.feedback, weights=self.weights)
        return replace(code, rotation=rotation).bound()


class RowStore(KVStore):
    is_coded = True
    conditioned: ClassVar[bool] = True  # keys may be stored centered, scaled and rotated
    joined: ClassVar[bool] = False  # key and value of a token side by side in one slot of even length

    def __init__(
        self, layout: KVLayout, num_pages: int, device: torch.device, kernels: str = "", sequences: int = 1
    ) -> None:
        super().__init__(layout, num_pages, device, kernels, sequences)
        pair = self.formats(layout)
        self._formats = [pair] * layout.layers_per_page
        shape = (layout.layers_per_page, num_pages, layout.num_kv_heads, layout.page_size)
        k_bytes, v_bytes = (each.row_bytes for each in pair)
        # Not zeroed on purpose: the operating system allocates memory only for pages that are written.
        if self.joined:
            slots = torch.empty(*shape, self._slot_bytes(layout), dtype=torch.uint8, device=device)
            self._tensors = [slots]
            self._k, self._v = slots[..., :k_bytes], slots[..., k_bytes : k_bytes + v_bytes]
        elif layout.is_latent:
            self._k = self._v = torch.empty(*shape, k_bytes, dtype=torch.uint8, device=device)
            self._tensors = [self._k]
        else:
            self._k = torch.empty(*shape, k_bytes, dtype=torch.uint8, device=device)
            self._v = torch.empty(*shape, v_bytes, dtype=torch.uint8, device=device)
            self._tensors = [self._k, self._v]
        self._backend = select("attention", device, kernels).backend
        self._packed = pair[0].packed(device) if self.on_gpu and self._backend == "triton" else None
        self._pages: list[CpuPages | None] = [self._bind(slot) for slot in range(layout.layers_per_page)]

    def use_formats(self, slot: int, k: RowFormat, v: RowFormat) -> None:
        """Others of the same size for one layer slot, before anything is written."""
        self._formats[slot] = (k, v)
        self._pages[slot] = self._bind(slot)

    def _bind(self, slot: int) -> CpuPages | None:
        k, v = (each.bound() if self._backend == "cpu" else None for each in self._formats[slot])
        return None if k is None or v is None else CpuPages(self._k[slot], self._v[slot], k, v)

    def meaning(self) -> str:
        digest = sha256()
        for k, v in self._formats:
            for row in (k, v):
                digest.update(type(row).__name__.encode())
                for tensor in row.constants():
                    digest.update(tensor.float().cpu().numpy().tobytes())
        layout = "" if self._packed is None else "-planes"
        return f"{self.name}-{digest.hexdigest()[:16]}{layout}"

    @property
    def conditions_keys(self) -> bool:
        # Layers of several groups share slots, so that no single vector is the mean of their keys. Latent rows are
        # values too. The GPU kernels rotate keys and values alike, so keys of other stores (int8) stay as they are.
        one_kind = len(self.layout.groups) == 1 and not self.layout.is_latent
        suits = self._backend != "triton" or (self._packed is not None and self._packed.turn is not None)
        return self.conditioned and one_kind and suits

    def condition_keys(self, slot: int, conditioning: KeyConditioning) -> None:
        k, v = self._formats[slot]
        if self._packed is not None:  # the GPU kernels do not compensate: coordinates would wait for each other
            center, scale = (each.to(self.device).contiguous() for each in (conditioning.center, conditioning.scale))
            moved = replace(conditioning, center=center, scale=scale)
            self.use_formats(slot, k.conditioned(moved, feedback=False), v)
            return
        self.use_formats(slot, k.conditioned(conditioning), v)

    @classmethod
    @abstractmethod
    def formats(cls, layout: KVLayout) -> tuple[RowFormat, RowFormat]:
        """The formats of keys and of values."""

    @classmethod
    def _slot_bytes(cls, layout: KVLayout) -> int:
        k, v = cls.formats(layout)
        total = k.row_bytes if layout.is_latent else k.row_bytes + v.row_bytes
        return total + total % 2 if cls.joined else total

    @classmethod
    def page_bytes(cls, layout: KVLayout) -> int:
        return layout.layers_per_page * layout.page_size * layout.num_kv_heads * cls._slot_bytes(layout)

    def write(self, slot: int, token_slots: Tensor, k: Tensor, v: Tensor) -> None:
        pages = self._pages[slot]
        if pages is not None:
            pages.store(k, v, token_slots)
            return
        page, offset = token_slots // self.layout.page_size, token_slots % self.layout.page_size
        sides = zip((k, v), (self._k, self._v), self._formats[slot], strict=True)
        for rows, tensor, form in islice(sides, 1 if self.layout.is_latent else 2):
            heads = rows.float().view(rows.shape[0], self.layout.num_kv_heads, -1)
            encoded, begin = form.encode(heads), 0
            for part in self._parts(tensor[slot], form):
                end = begin + part.shape[-1]
                part[page, :, offset] = encoded[..., begin:end]
                begin = end

    def read(self, slot: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        sides = []
        if self.layout.is_latent:
            k = self._formats[slot][0].decode(self._k[slot][pages])
            return k, k
        for tensor, form in zip((self._k, self._v), self._formats[slot], strict=True):
            sides.append(form.decode(torch.cat([part[pages] for part in self._parts(tensor[slot], form)], -1)))
        return sides[0], sides[1]

    def _parts(self, tensor: Tensor, form: RowFormat) -> list[Tensor]:
        """Views of rows [pages, kv_heads, page_size, bytes] that side by side are the rows of `form`."""
        if self._packed is None:
            return [tensor]
        size, cut = self.layout.page_size, self.layout.page_size * form.code_bytes
        blocks = tensor.flatten(2)
        return [plane.unflatten(2, (size, -1)) for plane in (blocks[..., :cut], blocks[..., cut:])]

    def gpu_declines(self, slot: int) -> str | None:  # noqa: ARG002
        return None if self._packed is not None else f"{self.name} rows have no GPU kernel"

    def packed_pages(self, slot: int) -> PackedPages | None:
        if self._packed is None:
            return None
        planes, conditioning = (self._k[slot].flatten(2), self._v[slot].flatten(2)), self._formats[slot][0].conditioning
        keys = None if conditioning is None else KeyTransform(conditioning.center, conditioning.scale)
        return PackedPages(*planes, self.layout.page_size, self._packed, keys)

    def pages(self, slot: int) -> tuple[Tensor, Tensor]:
        return self.read(slot, torch.arange(self.num_pages, device=self.device))

    def kernel_pages(self, slot: int) -> CpuPages | None:
        return self._pages[slot]

    def page_tensors(self) -> list[Tensor]:
        return self._tensors

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() for tensor in self._tensors)
