"""Token states -> one vector for each text: pooling, dense layers, normalisation; or the logits of a classifier.

Reads states of packed texts, group by group of one length. Knows sentence-transformers' ways to pool, no files.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tokenmill.checkpoint.configs.encoders import EncoderDescription
from tokenmill.checkpoint.embedding_files import DenseLayer, EmbeddingSettings
from tokenmill.checkpoint.safetensors import StoredTensors
from tokenmill.errors import CheckpointError
from tokenmill.model.encoders.encoder import activate
from tokenmill.model.encoders.packed import PackedTexts
from tokenmill.model.encoders.weights import EncoderWeights, Product


def pool(states: Tensor, batch: PackedTexts, modes: tuple[str, ...]) -> Tensor:
    """[T, hidden] -> [S, modes x hidden] float32, in the order of the batch."""
    if modes in (("cls",), ("lasttoken",)):
        places = batch.starts[:-1] if modes == ("cls",) else batch.starts[1:] - 1
        return states[places.long()].float()
    if states.is_cuda and modes == ("mean",):
        return _means_by_sums(states, batch.starts.long())
    size = states.shape[1]
    out = torch.empty(batch.num_texts, len(modes) * size, device=states.device, dtype=torch.float32)
    for group in batch.groups:
        rows = states[group.start : group.end].view(group.count, group.length, size)
        for number, mode in enumerate(modes):
            place = slice(number * size, (number + 1) * size)
            out[group.first : group.first + group.count, place] = _pool_group(rows, mode)
    return out


def _means_by_sums(states: Tensor, starts: Tensor) -> Tensor:
    """By differences of running sums: a few launches however many lengths there are. In float64, where a sum over all
    texts loses nothing that float32 has."""
    sums = torch.zeros(states.shape[0] + 1, states.shape[1], device=states.device, dtype=torch.float64)
    torch.cumsum(states, 0, dtype=torch.float64, out=sums[1:])
    lengths = (starts[1:] - starts[:-1])[:, None]
    return ((sums[starts[1:]] - sums[starts[:-1]]) / lengths).float()


def _pool_group(rows: Tensor, mode: str) -> Tensor:
    """[texts, length, hidden] -> [texts, hidden]."""
    length = rows.shape[1]
    if mode == "mean":
        return rows.sum(1, dtype=torch.float32).div_(length)
    if mode == "mean_sqrt_len_tokens":
        return rows.sum(1, dtype=torch.float32).div_(length**0.5)
    if mode == "max":
        return rows.amax(1).float()
    if mode == "weightedmean":
        weights = torch.arange(1, length + 1, device=rows.device, dtype=torch.float32)
        return torch.einsum("l,nld->nd", weights, rows.float()) / weights.sum()
    return (rows[:, 0] if mode == "cls" else rows[:, -1]).float()


class DenseStack:
    """The projections that modules.json puts behind the pooling, in float32."""

    def __init__(self, path: Path, layers: tuple[DenseLayer, ...], device: torch.device) -> None:
        self._layers = [(_read_dense(path, layer, device), layer.activation) for layer in layers]

    def __call__(self, x: Tensor) -> Tensor:
        for product, activation in self._layers:
            x = activate(activation, product(x))
        return x


class Vectors:
    """Of an embedding model: pooled, projected, and normalised if the model says so."""

    def __init__(self, path: Path, settings: EmbeddingSettings, device: torch.device) -> None:
        self._modes = settings.pooling
        self._normalize = settings.normalize
        self._dense = DenseStack(path, settings.dense, device)

    def __call__(self, states: Tensor, batch: PackedTexts) -> Tensor:
        vectors = self._dense(pool(states, batch, self._modes))
        return torch.nn.functional.normalize(vectors, dim=-1) if self._normalize else vectors


class ClassifierHead:
    """The logits of a classifier; of a cross-encoder they are scores."""

    def __init__(self, weights: EncoderWeights, d: EncoderDescription) -> None:
        self._d = d
        self._dense = weights.product(["head.dense"], [d.hidden_size], d.hidden_size)
        self._norm = weights.norm("head.norm", d.hidden_size, d.norm_eps) if d.head == "norm" else None
        self._out = weights.product(["head.out"], [len(d.labels)], d.hidden_size)

    def __call__(self, states: Tensor, batch: PackedTexts) -> Tensor:
        pooled = self._dense(pool(states, batch, (self._d.head_pooling,)).to(states.dtype))
        if self._norm is None:
            return self._out(pooled.tanh_()).float()
        return self._out(self._norm(activate(self._d.head_activation, pooled))).float()


def _read_dense(path: Path, layer: DenseLayer, device: torch.device) -> Product:
    stored = StoredTensors(path / layer.folder)
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (layer.out_features, layer.in_features)}
    if layer.bias:
        shapes["linear.bias"] = (layer.out_features,)
    found = {}
    for name, shape in shapes.items():
        if name not in stored.names() or tuple(stored.tensor(name).shape) != shape:
            problem = f"{layer.folder}: tensor '{name}' of shape {list(shape)} is missing"
            raise CheckpointError(problem, "download the model again")
        found[name] = stored.tensor(name).to(device, torch.float32, copy=True)
    return Product(found["linear.weight"], found.get("linear.bias"))
