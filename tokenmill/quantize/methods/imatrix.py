"""The importance matrix of GGUF: how much an error in each input column of each linear matters, from calibration.

It is the mean square of the input, collected block by block, and weights the searches of quantize/ggml. Not a
solver: GGUF needs bytes, not a QuantizedMatrix. Reads and writes the files of llama.cpp's llama-imatrix, so that either
program can use the other's. Called by the job for `--format gguf`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tokenmill.checkpoint.gguf import read_gguf_tensors
from tokenmill.checkpoint.gguf_families import STORED_AS
from tokenmill.checkpoint.gguf_names import canonical_name, gguf_name
from tokenmill.checkpoint.gguf_writer import GGUFWriter, TensorSlot, pack_value
from tokenmill.errors import UserError
from tokenmill.quantize.base import BlockView

_SQUARES, _COUNTS = ".in_sum2", ".counts"
_COLLECT = "collect it with llama-imatrix, or let `tokenmill quantize` calibrate"


@dataclass(frozen=True, slots=True)
class Importance:
    mean_square: Tensor  # float32 [in]
    num_tokens: int


class ImportanceMatrix(Mapping[str, Tensor]):
    """Canonical prefix of a linear -> mean square of its input [in]: the argument of `quantize_gguf`."""

    def __init__(self, entries: Mapping[str, Importance] | None = None) -> None:
        self._entries = dict(entries or {})

    def __getitem__(self, name: str) -> Tensor:
        return self._entries[name].mean_square

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def collect(self, block: BlockView) -> None:
        """Add the linears of one block, as its calibration data reaches them now."""
        for group in block.groups:
            statistics = block.statistics(group, ["mean_square"])
            assert statistics.mean_square is not None
            for name in group.names:
                self._entries[name] = Importance(statistics.mean_square.float(), statistics.num_tokens)

    def write(self, path: Path, architecture: str, dataset: str, chunk_size: int) -> None:
        """A file that llama-quantize reads with --imatrix. `chunk_size`: tokens of a calibration sequence."""
        if not self._entries:
            raise UserError("the importance matrix is empty", "calibrate first")
        tokens = max(entry.num_tokens for entry in self._entries.values())
        pairs = {
            "general.type": pack_value("imatrix"),
            "imatrix.datasets": pack_value([dataset]),
            "imatrix.chunk_count": pack_value(max(1, tokens // chunk_size)),
            "imatrix.chunk_size": pack_value(chunk_size),
        }
        slots, data = [], []
        for name, entry in sorted(self._entries.items()):
            stem = gguf_name(architecture, f"{name}.weight")
            slots += [
                TensorSlot(stem + _SQUARES, (1, entry.mean_square.shape[0]), "F32"),
                TensorSlot(stem + _COUNTS, (1, 1), "F32"),
            ]
            data += [entry.mean_square.float() * entry.num_tokens, torch.tensor([float(entry.num_tokens)])]
        with GGUFWriter(path, pairs, slots) as writer:
            for tensor in data:
                writer.append(tensor.contiguous().view(torch.uint8))

    @classmethod
    def read(cls, path: Path, architecture: str) -> ImportanceMatrix:
        """From a file of llama-imatrix (its GGUF form) or of `write`."""
        metadata, tensors = read_gguf_tensors(path)
        if metadata.get("general.type") != "imatrix":
            raise UserError(f"{path} is not an importance matrix", _COLLECT)
        entries = {}
        for stored_name, squares in tensors.items():
            if not stored_name.endswith(_SQUARES):
                continue
            stem = stored_name.removesuffix(_SQUARES)
            counts = tensors.get(stem + _COUNTS)
            if counts is None or counts.numel() != 1 or squares.numel() != squares.shape[-1]:
                raise UserError(f"{path}: {stem} is stacked for experts, or has no counts", _COLLECT)
            count = float(counts)
            if count > 0:
                name = canonical_name(STORED_AS.get(architecture, architecture), stem).removesuffix(".weight")
                entries[name] = Importance(squares.flatten().float() / count, int(count))
        if not entries:
            raise UserError(f"{path} has no entry that saw any token", _COLLECT)
        return cls(entries)
