"""Checkpoint -> model: build the architecture, account for every tensor, make each weight ready for its kernel.

Weights stay in their stored format: a kernel that repacks owns the packed copy, and the mapped pages it was made from
are given back. Knows nothing of batches or requests. Called by the engine's construction and by `inspect`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.kernels.base import select_linear
from tokenmill.log import get_logger
from tokenmill.model.architectures import ARCHITECTURES
from tokenmill.model.architectures.decoder import Decoder
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.reader import WeightReader

_log = get_logger(__name__)
_PACKING_THREADS = 2


@dataclass(slots=True, eq=False)
class LoadedModel:
    decoder: Decoder
    weights: dict[str, LinearWeight]  # by canonical prefix
    checkpoint: Checkpoint  # keeps the mapping alive
    where: torch.device
    kernels: str  # forced backend, or empty

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights.values())


def load_model(checkpoint: Checkpoint, where: torch.device, num_positions: int, kernels: str = "") -> LoadedModel:
    """`num_positions`: how many positions the rotary tables cover (the engine's context length)."""
    description = checkpoint.description
    reader = WeightReader(checkpoint)
    architecture = ARCHITECTURES.get(description.architecture)
    decoder: Decoder = architecture(reader, description, num_positions)
    reader.finish()

    def prepare(prefix: str) -> None:
        weight = reader.weights[prefix]
        weight.kernel = select_linear(weight, where, kernels)
        if weight.kernel.backend != "ref":  # the kernel has its own packed copy: one is enough
            for name in reader.tensor_names[prefix]:
                checkpoint.release(name)

    multiplied = [
        prefix for prefix, weight in reader.weights.items() if weight is not decoder.embedding or weight is decoder.head
    ]
    with ThreadPoolExecutor(_PACKING_THREADS) as pool:
        list(pool.map(prepare, multiplied))
    return LoadedModel(decoder, reader.weights, checkpoint, where, kernels)
