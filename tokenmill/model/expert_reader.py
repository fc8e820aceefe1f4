"""Experts of a layer from a checkpoint, whichever way the file keeps them.

One matrix per expert and projection (Mixtral, Qwen, DeepSeek), gate and up joined or apart in tensors with an axis of
experts (GGUF, Granite, fused files), transposed (Llama 4), transposed and interleaved (GPT-OSS) or as MXFP4 blocks.
The layout is recognised by the tensors present. Every matrix is registered with the reader under the name that it has
where experts are separate. Used by layers/experts.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tokenmill.checkpoint.base import StoredTensor
from tokenmill.kernels.ggml_types import TYPES
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.formats.dense import DenseWeight
from tokenmill.model.formats.ggml import GgmlWeight
from tokenmill.model.formats.stacks import ExpertStacks, WeightStack
from tokenmill.model.reader import WeightReader

if TYPE_CHECKING:
    from torch import Tensor

_PARTS = ("gate_proj", "up_proj", "down_proj")
_MX_BLOCK = 32  # values per scale of MXFP4


@dataclass(frozen=True, slots=True)
class _Style:
    """Where a family keeps its experts, relative to the layer. `parts`: gate, up and down of a separate expert."""

    router: str
    experts: str
    parts: tuple[str, str, str] = _PARTS
    joined: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")  # tensors [experts, ...]
    transposed: bool = False  # joined tensors are [experts, in, out]
    interleaved: bool = False  # rows of gate and up alternate


_STYLES = (
    _Style("mlp.gate", "mlp.experts"),
    _Style("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
    _Style("mlp.router", "mlp.experts", transposed=True, interleaved=True),
    _Style(
        "feed_forward.router",
        "feed_forward.experts",
        joined=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
        transposed=True,
    ),
    _Style(
        "block_sparse_moe.router.layer",
        "block_sparse_moe.experts",
        joined=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    ),
)


@dataclass(frozen=True, slots=True)
class ExpertShape:
    count: int
    hidden: int
    width: int
    bias: bool  # of the experts' products
    router_bias: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """One projection of all experts: views of mapped tensors, [experts, out, ...]."""

    shape: tuple[int, int]  # of one expert's matrix
    type_name: str
    data: Tensor
    scales: Tensor | None = None  # of MXFP4: [experts, out, in / 32]
    bias: Tensor | None = None  # [experts, out] float32

    def rows(self, cut: slice) -> _Source:
        """Some of the rows of every expert."""
        data = self.data[:, cut]
        return replace(
            self,
            shape=(data.shape[1], self.shape[1]),
            data=data,
            scales=None if self.scales is None else self.scales[:, cut],
            bias=None if self.bias is None else self.bias[:, cut],
        )

    def weight(self, expert: int, name: str) -> LinearWeight:
        weight: LinearWeight
        if self.scales is not None:
            from tokenmill.model.formats.float4 import Float4Weight

            weight = Float4Weight({"weight_packed": self.data[expert], "weight_scale": self.scales[expert]}, name)
        else:
            stored = StoredTensor(name, self.shape, self.type_name, self.data[expert])
            kind = TYPES.get(self.type_name)
            weight = GgmlWeight(stored) if kind is not None and kind.is_block else DenseWeight(stored)
        if self.bias is not None:
            weight.bias = self.bias[expert]
        return weight


def read_router(reader: WeightReader, layer: str, shape: ExpertShape) -> LinearWeight:
    """The router's matrix, in float32 where the file has any float type: rounding it would change who is chosen."""
    router = reader.linear(f"{layer}.{_style(reader, layer).router}", shape.count, shape.hidden, shape.router_bias)
    router.precise = True
    if isinstance(router, DenseWeight) and not getattr(router.values, "is_meta", False):
        router.values = reader.floats(StoredTensor(layer, (shape.count, shape.hidden), router.type_name, router.values))
        router.type_name = "F32"
    return router


def router_name(reader: WeightReader, layer: str) -> str:
    return f"{layer}.{_style(reader, layer).router}"


def read_experts(reader: WeightReader, layer: str, shape: ExpertShape) -> ExpertStacks:
    """`layer`: the prefix of the layer, as model.layers.3."""
    style = _style(reader, layer)
    prefix = f"{layer}.{style.experts}"
    return reader.experts(prefix, _read_all(reader, layer, prefix, style, shape))


def _read_all(reader: WeightReader, layer: str, prefix: str, style: _Style, shape: ExpertShape) -> ExpertStacks:
    names, sources = _joined_sources(reader, layer, style, shape)
    if not sources:
        return _separate(reader, prefix, style, shape)
    experts: list[list[LinearWeight]] = []
    for expert in range(shape.count):
        # The mapped pages of a joined tensor can be released once the last expert has been converted.
        released = names if expert == shape.count - 1 else []
        experts.append([])
        for part, source in zip(_PARTS, sources, strict=True):
            name = f"{prefix}.{expert}.{part}"
            experts[-1].append(reader.add(name, source.weight(expert, name), released))
    return _stacks(experts)


def _style(reader: WeightReader, layer: str) -> _Style:
    """The style whose names the layer has; the first where it has none."""
    found = [
        sum(reader.has_prefix(f"{layer}.{prefix}") for prefix in (style.router, style.experts)) for style in _STYLES
    ]
    return _STYLES[found.index(max(found))]


def _stacks(experts: list[list[LinearWeight]]) -> ExpertStacks:
    gate_up, down = [weights[:2] for weights in experts], [weights[2:] for weights in experts]
    return ExpertStacks(WeightStack(gate_up), WeightStack(down))


def _separate(reader: WeightReader, prefix: str, style: _Style, shape: ExpertShape) -> ExpertStacks:
    sizes = ((shape.width, shape.hidden), (shape.width, shape.hidden), (shape.hidden, shape.width))
    # A file that we wrote ourselves from a joined one has the plain names.
    parts = _PARTS if reader.has_prefix(f"{prefix}.0.{_PARTS[0]}") else style.parts
    return _stacks(
        [
            [
                reader.linear(f"{prefix}.{expert}.{name}", *size, shape.bias)
                for name, size in zip(parts, sizes, strict=True)
            ]
            for expert in range(shape.count)
        ]
    )


def _joined_sources(
    reader: WeightReader, layer: str, style: _Style, shape: ExpertShape
) -> tuple[list[str], list[_Source]]:
    """(names of the tensors, gate, up and down of all experts); nothing where experts are separate."""
    experts, width, hidden = f"{layer}.{style.experts}", shape.width, shape.hidden
    joined, down = (f"{layer}.{name}" for name in style.joined)
    if f"{experts}.gate_up_proj.weight" in reader.checkpoint:  # GGUF
        names = [f"{experts}.gate_up_proj", f"{experts}.down_proj"]
        both, output = (
            _stored(reader, f"{name}.weight", f"{name}.bias", shape, size)
            for name, size in zip(names, ((2 * width, hidden), (hidden, width)), strict=True)
        )
        return [f"{name}.weight" for name in names], [both.rows(slice(width)), both.rows(slice(width, None)), output]
    if any(f"{experts}.{part}.weight" in reader.checkpoint for part in _PARTS):  # GGUF
        names = [f"{experts}.{part}" for part in _PARTS]
        sizes = ((width, hidden), (width, hidden), (hidden, width))
        sources = [
            _stored(reader, f"{name}.weight", f"{name}.bias", shape, size)
            for name, size in zip(names, sizes, strict=True)
        ]
        return [f"{name}.weight" for name in names], sources
    read: Callable[[WeightReader, str, str, ExpertShape, tuple[int, int], bool], _Source]
    if joined in reader.checkpoint:
        read, names = _stored, [joined, down]
    elif f"{joined}_blocks" in reader.checkpoint:
        read, names = _mxfp4, [f"{joined}_blocks", f"{down}_blocks"]
    else:
        return [], []
    both = read(reader, joined, f"{joined}_bias", shape, (2 * width, hidden), style.transposed)
    output = read(reader, down, f"{down}_bias", shape, (hidden, width), style.transposed)
    cuts = (slice(0, None, 2), slice(1, None, 2)) if style.interleaved else (slice(width), slice(width, None))
    return names, [*map(both.rows, cuts), output]


def _stored(
    reader: WeightReader, name: str, bias: str, shape: ExpertShape, size: tuple[int, int], transposed: bool = False
) -> _Source:
    out, columns = size
    stored = reader.tensor(name, (shape.count, columns, out) if transposed else (shape.count, out, columns))
    data = stored.data.swapaxes(1, 2) if transposed else stored.data
    return _Source(size, stored.type_name, data, bias=_bias(reader, bias, shape, out))


def _mxfp4(
    reader: WeightReader, name: str, bias: str, shape: ExpertShape, size: tuple[int, int], _transposed: bool
) -> _Source:
    """Blocks [experts, out, in / 32, 16] of 4-bit floats, two to a byte, with a power of two each."""
    out, columns = size
    groups = columns // _MX_BLOCK
    blocks = reader.tensor(f"{name}_blocks", (shape.count, out, groups, _MX_BLOCK // 2)).data
    scales = reader.tensor(f"{name}_scales", (shape.count, out, groups)).data
    return _Source(size, "MXFP4", blocks.flatten(2), scales, _bias(reader, bias, shape, out))


def _bias(reader: WeightReader, name: str, shape: ExpertShape, out: int) -> Tensor | None:
    return reader.floats(reader.tensor(name, (shape.count, out))) if shape.bias else None
