"""What lies outside the blocks: embedding, final norm, head. The ModelView that transforms may rewrite before a job.
Transforms that learn before the first block is done see the whole model through it (`JobData`).

Written in the output's float type, tile by tile, so that a large vocabulary is never in memory as float32 unless a
transform needs it. Used by the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from safetensors.torch import load_file
from torch import Tensor

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.base import OutputTurn, Statistics
from tokenmill.quantize.calibrate import CalibratedBlock, HiddenStates
from tokenmill.quantize.fisher import linear_grams, output_roots
from tokenmill.quantize.source import EMBEDDING, FINAL_NORM, HEAD, SourceModel, narrow, stored_norm
from tokenmill.quantize.workspace import Workspace


@dataclass(frozen=True, slots=True, eq=False)
class JobData:
    """What transforms may learn from: calibration tokens [sequences, length], the schemes, where results are kept."""

    sequences: Tensor
    batch: int  # sequences computed at a time
    device: torch.device
    scheme_of: Mapping[str, Scheme]
    workspace: Workspace | None = None


class Edges:
    """A ModelView. `description` is that of the output: untied once a transform has made the two differ."""

    def __init__(self, source: SourceModel, data: JobData | None = None) -> None:
        self._source = source
        self._data = data
        self._replaced: dict[str, Tensor] = {}
        self._turns: list[OutputTurn] = []
        self.description: ModelDescription = source.description

    def weight(self, name: str) -> Tensor:
        return self._replaced[name] if name in self._replaced else self._source.read_edge(name)

    def replace(self, name: str, value: Tensor) -> None:
        if name in (EMBEDDING, HEAD) and self.description.tie_embeddings:
            other = HEAD if name == EMBEDDING else EMBEDDING
            self._replaced.setdefault(other, self._source.read_edge(other))
            self.description = replace(self.description, tie_embeddings=False)
        self._replaced[name] = value.detach().float()

    def scheme_of(self) -> Mapping[str, Scheme]:
        assert self._data is not None, "this job has no calibration data"
        return self._data.scheme_of

    def survey(self, kinds: Sequence[str]) -> Iterator[tuple[CalibratedBlock, Mapping[str, Statistics]]]:
        assert self._data is not None, "this job has no calibration data"
        states = HiddenStates(self._source.embed(self._data.sequences), self._data.batch)
        for index in range(self._source.num_blocks):
            block = CalibratedBlock(self._source, index, states, self._data.device)
            yield block, block.survey(kinds)

    def output_roots(self) -> list[Tensor]:
        assert self._data is not None, "this job has no calibration data"
        return output_roots(self._source, self._data.sequences, self._data.device)

    def linear_grams(self) -> dict[str, Tensor]:
        assert self._data is not None, "this job has no calibration data"
        return linear_grams(self._source, self._data.sequences, self._data.device, self._turns)

    def turn_outputs(self, turn: OutputTurn) -> None:
        self._turns.append(turn)

    def remember(self, name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        workspace = None if self._data is None else self._data.workspace
        if workspace is None:
            return make()
        path = workspace.learned(name)
        if not path.exists():
            workspace.save(path, make())
        return load_file(path)

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
