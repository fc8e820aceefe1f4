"""Recurrent mixers: Mamba, Mamba 2 and the gated delta rule, written against Ops like every layer.

Projections are matrices like any other; the convolution and the scan keep states per sequence (model/state/). Tensor
names below the mixer's prefix are the same in all families that have it. Used by architectures/hybrid.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.mixers import Recurrent
from tokenmill.kernels.cpu import contiguous
from tokenmill.model.ops import Ops, Value
from tokenmill.model.reader import WeightReader
from tokenmill.model.state.specs import ConvolutionSpec, DeltaScan, Mamba2Scan, MambaScan

if TYPE_CHECKING:
    from torch import Tensor


class RecurrentMixer(Protocol):
    def __call__(self, ops: Ops, x: Value) -> Value: ...


def make_recurrent(reader: WeightReader, description: ModelDescription, layer: int, prefix: str) -> RecurrentMixer:
    (mixer,) = (mixer for mixer in description.layers[layer].mixers if isinstance(mixer, Recurrent))
    kinds: dict[str, Callable[..., RecurrentMixer]] = {"mamba": Mamba, "mamba2": Mamba2, "delta": GatedDeltaRule}
    return kinds[mixer.style](reader, description, mixer, layer, prefix)


class Mamba:
    """x, z -> convolution -> time steps, B, C from x -> scan -> gate -> output projection."""

    def __init__(
        self, reader: WeightReader, description: ModelDescription, mixer: Recurrent, layer: int, prefix: str
    ) -> None:
        hidden, m = description.hidden_size, mixer
        self.inner, self.norm_eps = m.inner, m.step_norm_eps
        self.widths = (m.rank, m.state_size, m.state_size)
        self.input = reader.linear(f"{prefix}.in_proj", 2 * m.inner, hidden, m.input_bias)
        self.convolution = _convolution(reader, m, layer, prefix)
        self.steps = reader.linear(f"{prefix}.x_proj", sum(self.widths), m.inner)
        self.time = reader.linear(f"{prefix}.dt_proj", m.inner, m.rank, bias=True)
        self.norms: list[Tensor] = []
        if m.step_norms == "weighted":
            self.norms = [
                reader.vector(f"{prefix}.{name}_layernorm.weight", width)
                for name, width in zip(("dt", "b", "c"), self.widths, strict=True)
            ]
        elif m.step_norms == "plain":
            self.norms = [reader.own(np.ones(width, dtype=np.float32)) for width in self.widths]
        decays = _decays(reader, prefix, (m.inner, m.state_size))
        self.scan = MambaScan(layer, decays, reader.vector(f"{prefix}.D", m.inner))
        self.output = reader.linear(f"{prefix}.out_proj", hidden, m.inner, m.output_bias)

    def __call__(self, ops: Ops, x: Value) -> Value:
        x, gate = ops.split(ops.linear(x, [self.input])[0], (self.inner, self.inner))
        x = ops.convolve(x, self.convolution)
        parts = ops.split(ops.linear(x, [self.steps])[0], self.widths)
        if self.norms:
            parts = [ops.rms_norm(part, norm, self.norm_eps) for part, norm in zip(parts, self.norms, strict=True)]
        time, b, c = parts
        y = ops.scan((x, ops.linear(time, [self.time])[0], b, c), self.scan)
        return ops.linear(ops.gated(gate, y, "silu"), [self.output])[0]


class Mamba2:
    """z, (x, B, C), dt -> one convolution over x, B and C -> scan -> gate and norm -> output projection.

    Constants that multiply the projections go where they cost nothing: into the convolution's weights, the time steps
    and the gate.
    """

    def __init__(
        self, reader: WeightReader, description: ModelDescription, mixer: Recurrent, layer: int, prefix: str
    ) -> None:
        hidden, m = description.hidden_size, mixer
        gate, x, b, c, time = m.multipliers
        self.widths = (m.inner, m.convolved, m.num_heads)
        self.input = reader.linear(f"{prefix}.in_proj", sum(self.widths), hidden, m.input_bias)
        group = m.num_groups * m.state_size
        factors = np.repeat(np.array([x, b, c], dtype=np.float32), [m.inner, group, group])
        self.convolution = _convolution(reader, m, layer, prefix, factors)
        decays = _decays(reader, prefix, (m.num_heads,))
        skip, bias = (reader.vector(f"{prefix}.{name}", m.num_heads) for name in ("D", "dt_bias"))
        self.scan = Mamba2Scan(layer, decays, skip, bias, m.num_groups, time, m.time_step_limits)
        self.gate_scale, self.output_scale, self.eps = gate, m.output_scale, description.norm_eps
        self.norm: Tensor | None = None
        self.norm_first = m.norm == "ungated"
        if m.norm:
            self.norm = reader.vector(f"{prefix}.norm.weight", m.inner).reshape(m.num_groups, -1)
        self.output = reader.linear(f"{prefix}.out_proj", hidden, m.inner, m.output_bias)

    def __call__(self, ops: Ops, x: Value) -> Value:
        gate, x, time = ops.split(ops.linear(x, [self.input])[0], self.widths)
        y = ops.scan((ops.convolve(x, self.convolution), time), self.scan)
        if self.norm is not None:
            y = ops.gated_norm(y, gate, self.norm, self.eps, self.norm_first, self.gate_scale)
        else:
            y = ops.gated(_scaled(ops, gate, self.gate_scale), y, "silu")
        return _scaled(ops, ops.linear(y, [self.output])[0], self.output_scale)


class GatedDeltaRule:
    """(q, k, v), z, b, a -> one convolution over q, k and v -> scan -> norm of each head, gated -> output projection.

    The rows of joined input matrices lie by key head: q, k, then v and z of the value heads that it serves. A GGUF has
    z apart, and the rows of q, k and v one after the other.
    """

    def __init__(
        self, reader: WeightReader, description: ModelDescription, mixer: Recurrent, layer: int, prefix: str
    ) -> None:
        hidden, m = description.hidden_size, mixer
        self.key_heads = m.num_key_heads
        keys, values = m.num_key_heads * m.key_dim, m.num_heads * m.value_dim
        self.qkv_widths = (keys, keys, values)
        widths = {"qkv": 2 * keys + values, "z": values}
        if m.joined_inputs and not reader.has_prefix(f"{prefix}.in_proj_qkv"):
            widths = {"qkvz": 2 * keys + 2 * values}
        widths |= {"ba": 2 * m.num_heads} if m.joined_inputs else {"b": m.num_heads, "a": m.num_heads}
        self.input_names = tuple(widths)
        self.inputs = [reader.linear(f"{prefix}.in_proj_{name}", width, hidden) for name, width in widths.items()]
        share = m.num_heads // m.num_key_heads
        self.head_widths = (m.key_dim, m.key_dim, share * m.value_dim, share * m.value_dim)
        self.gate_widths = (share, share)
        self.convolution = _convolution(reader, m, layer, prefix)
        decays = _decays(reader, prefix, (m.num_heads,))
        self.scan = DeltaScan(layer, decays, reader.vector(f"{prefix}.dt_bias", m.num_heads), m.num_key_heads)
        self.norm = reader.vector(f"{prefix}.norm.weight", m.value_dim)  # stored as it is, unlike the model's norms
        self.eps = description.norm_eps
        self.output = reader.linear(f"{prefix}.out_proj", hidden, values)

    def __call__(self, ops: Ops, x: Value) -> Value:
        values = dict(zip(self.input_names, ops.linear(x, self.inputs), strict=True))
        if "qkvz" in values:
            q, k, v, gate = ops.split(values["qkvz"], self.head_widths, self.key_heads)
            qkv = ops.join((q, k, v))
        else:
            qkv, gate = values["qkv"], values["z"]
        if "ba" in values:
            beta, time = ops.split(values["ba"], self.gate_widths, self.key_heads)
        else:
            beta, time = values["b"], values["a"]
        y = ops.scan((ops.convolve(qkv, self.convolution), beta, time), self.scan)
        return ops.linear(ops.gated_norm(y, gate, self.norm, self.eps, True), [self.output])[0]


def _decays(reader: WeightReader, prefix: str, shape: tuple[int, ...]) -> Tensor:
    """What multiplies time steps; a GGUF has it as it is, those by head as a column."""
    is_plain = f"{prefix}.A" in reader.checkpoint
    name = f"{prefix}.{'A' if is_plain else 'A_log'}"
    values = reader.vector(name, shape[0]) if len(shape) == 1 else reader.array(name, shape)
    if is_plain:
        return values
    return -np.exp(values) if isinstance(values, np.ndarray) else -values.exp()


def _convolution(
    reader: WeightReader, mixer: Recurrent, layer: int, prefix: str, factors: np.ndarray | None = None
) -> ConvolutionSpec:
    """`factors` [channels] multiply the inputs."""
    channels = mixer.convolved
    weight = reader.array(f"{prefix}.conv1d.weight", (channels, 1, mixer.convolution))[:, 0].T
    if factors is not None:
        weight = weight * (factors if isinstance(weight, np.ndarray) else reader.own(factors).to(weight.device))
    bias = reader.vector(f"{prefix}.conv1d.bias", channels) if mixer.convolution_bias else None
    return ConvolutionSpec(layer, contiguous(weight), bias)


def _scaled(ops: Ops, x: Value, factor: float) -> Value:
    return x if factor == 1.0 else ops.scale(x, factor)
