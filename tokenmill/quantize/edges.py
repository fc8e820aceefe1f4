"""What lies outside the blocks: embedding, final norm, head. The ModelView that transforms may rewrite before a job.

Written in the output's float type, tile by tile, so that a large vocabulary is never in memory as float32 unless a
transform needs it. Used by the job.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.quantize.source import EMBEDDING, FINAL_NORM, HEAD, SourceModel, narrow, stored_norm


class Edges:
    """A ModelView. `description` is that of the output: untied once a transform has made the two differ."""

    def __init__(self, source: SourceModel) -> None:
        self._source = source
        self._replaced: dict[str, Tensor] = {}
        self.description: ModelDescription = source.description

    def weight(self, name: str) -> Tensor:
        return self._replaced[name] if name in self._replaced else self._source.read_edge(name)

    def replace(self, name: str, value: Tensor) -> None:
        if name in (EMBEDDING, HEAD) and self.description.tie_embeddings:
            other = HEAD if name == EMBEDDING else EMBEDDING
            self._replaced.setdefault(other, self._source.read_edge(other))
            self.description = replace(self.description, tie_embeddings=False)
        self._replaced[name] = value.detach().float()

    def embed(self, ids: Tensor) -> Tensor:
        return self._source.embed(ids, self._replaced.get(EMBEDDING))

    def stored(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of the output file."""
        names = [EMBEDDING] if self.description.tie_embeddings else [EMBEDDING, HEAD]
        tensors = {}
        for name in names:
            replaced = self._replaced.get(name)
            tensors[f"{name}.weight"] = (
                self._source.narrowed(name, dtype) if replaced is None else narrow(name, replaced, dtype)
            )
        norm = stored_norm(self.weight(FINAL_NORM), self.description.norm_offset)
        tensors[f"{self._source.final_norm}.weight"] = narrow(FINAL_NORM, norm, dtype)
        return tensors

    def drop_tables(self) -> None:
        """Free replaced tables once hidden states and files have been made from them."""
        self._replaced.clear()
