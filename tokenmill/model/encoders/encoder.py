"""The forward pass of an encoder over packed texts: embeddings, layers, final norm.

Written once for all families by the facts of EncoderDescription. Plain torch: its float products are near the peak of a
CPU and of a GPU, and what is won here is that no padding is computed, that the three projections of attention are one
product, and that sums and activations happen in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.checkpoint.configs.encoders import EncoderDescription
from tokenmill.model.encoders.attention import attend
from tokenmill.model.encoders.packed import PackedTexts
from tokenmill.model.encoders.weights import EncoderWeights, LayerNorm


def activate(name: str, x: Tensor) -> Tensor:
    """In place, where torch can."""
    if name == "gelu":
        return torch.ops.aten.gelu_(x)
    if name == "gelu_tanh":
        return torch.ops.aten.gelu_(x, approximate="tanh")
    if name == "silu":
        return torch.nn.functional.silu(x, inplace=True)
    if name == "relu":
        return x.relu_()
    if name == "sigmoid":
        return x.sigmoid_()
    if name == "tanh":
        return x.tanh_()
    assert name == "identity", name
    return x


class _Layer:
    def __init__(self, weights: EncoderWeights, d: EncoderDescription, number: int) -> None:
        size, inner, name = d.hidden_size, d.intermediate_size, f"layers.{number}"
        fused = weights.has(f"{name}.qkv")
        parts = [f"{name}.qkv"] if fused else [f"{name}.{part}" for part in "qkv"]
        self.qkv = weights.product(parts, [3 * size] if fused else [size] * 3, size)
        self.out = weights.product([f"{name}.out"], [size], size)
        if d.gated:
            both = weights.has(f"{name}.gate_up")
            parts = [f"{name}.gate_up"] if both else [f"{name}.gate", f"{name}.up"]
            self.up = weights.product(parts, [2 * inner] if both else [inner] * 2, size)
        else:
            self.up = weights.product([f"{name}.up"], [inner], size)
        self.down = weights.product([f"{name}.down"], [size], inner)
        has_norm = not d.pre_norm or d.first_norm or number > 0
        self.attention_norm = weights.norm(f"{name}.attention_norm", size, d.norm_eps) if has_norm else None
        self.mlp_norm = weights.norm(f"{name}.mlp_norm", size, d.norm_eps)
        self.window = d.windows[number]
        self._gated = d.gated
        self._activation = d.activation

    def mlp(self, x: Tensor) -> Tensor:
        wide = self.up(x)
        if not self._gated:
            return self.down(activate(self._activation, wide))
        gate, up = wide.chunk(2, dim=-1)
        return self.down(activate(self._activation, gate.contiguous()).mul_(up))


class Encoder:
    def __init__(self, weights: EncoderWeights, description: EncoderDescription, kernel: bool) -> None:
        """`kernel`: attention by the packed kernel of the device."""
        d = self.description = description
        self._kernel = kernel
        self._tokens = weights.table("embeddings.tokens", d.vocab_size, d.hidden_size)
        self._positions: Tensor | None = None
        if not d.rope_thetas:
            rows = d.first_position + d.context_length
            self._positions = weights.table("embeddings.positions", rows, d.hidden_size)
        self._types: Tensor | None = None
        if d.num_token_types:
            self._types = weights.table("embeddings.types", d.num_token_types, d.hidden_size)
        if self._positions is not None and self._types is not None:  # nearly all texts are of the first type
            self._positions = self._positions + self._types[0]
        self._norm = weights.norm("embeddings.norm", d.hidden_size, d.norm_eps)
        self._layers = [_Layer(weights, d, number) for number in range(d.num_layers)]
        self._final: LayerNorm | None = weights.norm("final_norm", d.hidden_size, d.norm_eps) if d.pre_norm else None
        device = self._tokens.device
        self._inverse = {theta: _inverse_frequencies(theta, d.rotary_size, device) for theta in d.rope_thetas}

    def forward(self, batch: PackedTexts) -> Tensor:
        """[T, hidden]: the state of every token."""
        d = self.description
        dtype = self._tokens.dtype
        rotations = {theta: _rotation(batch.positions, each, dtype) for theta, each in self._inverse.items()}
        x = self._embed(batch)
        for number, layer in enumerate(self._layers):
            y = layer.attention_norm(x) if d.pre_norm and layer.attention_norm is not None else x
            qkv = layer.qkv(y)
            if rotations:
                _rotate(qkv, d.num_heads, *rotations[d.rope_thetas[number]])
            mixed = layer.out(attend(qkv, batch, d.num_heads, layer.window, self._kernel))
            if d.pre_norm:
                x = x.add_(mixed)
                x = x.add_(layer.mlp(layer.mlp_norm(x)))
            else:
                assert layer.attention_norm is not None
                x = layer.attention_norm(mixed.add_(x))
                x = layer.mlp_norm(layer.mlp(x).add_(x))
        return x if self._final is None else self._final(x)

    def _embed(self, batch: PackedTexts) -> Tensor:
        x = torch.nn.functional.embedding(batch.token_ids, self._tokens)
        if self._positions is not None:
            x += torch.nn.functional.embedding(batch.positions + self.description.first_position, self._positions)
        elif self._types is not None:
            x += self._types[0]
        if self._types is not None and batch.types is not None and self.description.marks_pairs:
            x += batch.types[:, None] * (self._types[1] - self._types[0])
        return self._norm(x)


def _inverse_frequencies(theta: float, size: int, device: torch.device) -> Tensor:
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    return (1.0 / theta**exponents).to(device)


def _rotation(positions: Tensor, inverse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [T, 1, 1, size / 2]."""
    angles = (positions[:, None].float() * inverse)[:, None, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(qkv: Tensor, num_heads: int, cosines: Tensor, sines: Tensor) -> None:
    """Rotate the queries and keys in place: the first half of the rotated dimensions against the second."""
    half = cosines.shape[-1]
    both = qkv.view(qkv.shape[0], 3, num_heads, -1)[:, :2]
    first, second = both[..., :half], both[..., half : 2 * half]
    turned = first * cosines - second * sines
    second.copy_(second * cosines + first * sines)
    first.copy_(turned)
