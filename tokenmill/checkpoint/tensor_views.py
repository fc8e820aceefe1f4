"""Canonical tensors as parts of stored ones: a fused matrix cut into its rows, a transposed one, norms of heads joined.

So architectures, the quantizer and the planner see one matrix per projection, whatever the file joins. Cutting rows of
a mapped tensor copies nothing. Works for plain types, ggml blocks and the packed formats that keep their outputs along
one axis. Used by gguf.py and safetensors.py, which say under which canonical name each stored tensor goes;
mapped_tensor.py takes the tensors. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.errors import CheckpointError

FUSED_QKV, FUSED_GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
_FUSED = re.compile(rf"model\.layers\.(\d{{1,6}})\.({re.escape(FUSED_QKV)}|{re.escape(FUSED_GATE_UP)})\.(\w+)")
# Which axis of a part holds the outputs of the matrix; the parts that have none serve every piece.
_AXES = {
    "weight": 0,
    "bias": 0,
    "weight_packed": 0,
    "weight_scale": 0,
    "weight_scale_inv": 0,
    "weight_zero_point": 0,
    "qweight": 1,
    "qzeros": 1,
    "scales": 1,
}
_SHARED = ("g_idx", "weight_g_idx", "weight_global_scale", "input_scale", "input_global_scale", "weight_shape")


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a fused matrix: of each `period` rows, `count` from `begin` on."""

    begin: int
    count: int
    period: int


@dataclass(frozen=True, slots=True)
class TensorView:
    """Stored tensors (more than one: stacked), of which `rows` are taken along `axis`; all of them if None."""

    sources: tuple[str, ...]
    transposed: bool = False
    rows: Rows | None = None
    total_rows: int = 0  # of the fused matrix
    axis: int = 0


def cut_places(view: TensorView, size: int) -> tuple[int, int, int]:
    """(begin, count, period) of the view's rows in a stored part that has `size` of them, such as one per group."""
    rows, total = view.rows, view.total_rows
    assert rows is not None
    places = [number * size for number in (rows.begin, rows.count, rows.period)]
    if any(place % total for place in places):
        raise CheckpointError(
            f"'{view.sources[0]}' of {size} rows cannot be cut at rows {rows.begin} and {rows.begin + rows.count} of "
            f"{total}",
            "the file does not fit its config, or quantize the matrices it joins one by one",
        )
    begin, count, period = (place // total for place in places)
    return begin, count, period


def split_fused(
    description: ModelDescription, views: dict[str, TensorView], grouped_qkv: bool
) -> dict[str, TensorView]:
    """Each part of a fused matrix replaced by those of the matrices it joins. `grouped_qkv`: the rows lie by KV head,
    its queries first, then its key and its value; otherwise all queries come first, then all keys, then all values."""
    result: dict[str, TensorView] = {}
    for name, view in views.items():
        match = _FUSED.fullmatch(name)
        known = match is not None and (match[3] in _AXES or match[3] in _SHARED)
        if match is None or not known or int(match[1]) >= description.num_layers:
            result[name] = view
            continue
        prefix = f"model.layers.{match[1]}"
        for module, rows, whole in _pieces(description, int(match[1]), match[2], grouped_qkv):
            taken = rows if match[3] in _AXES or match[3] == "weight_shape" else None
            axis = _AXES.get(match[3], 0)
            result[f"{prefix}.{module}.{match[3]}"] = replace(view, rows=taken, total_rows=whole, axis=axis)
    return result


def _pieces(
    description: ModelDescription, layer: int, module: str, grouped_qkv: bool
) -> Iterable[tuple[str, Rows, int]]:
    """(canonical name, rows, rows of the whole) of each matrix that `module` joins."""
    if module == FUSED_GATE_UP:
        mlp = description.layers[layer].feed_forward
        size = mlp.intermediate_size if mlp is not None else 0
        for number, name in enumerate(("gate_proj", "up_proj")):
            yield f"mlp.{name}", Rows(number * size, size, 2 * size), 2 * size
        return
    a = description.layers[layer].attention
    group, dim = a.num_heads // a.num_kv_heads, a.head_dim
    whole = (a.num_heads + 2 * a.num_kv_heads) * dim
    blocks = a.num_kv_heads if grouped_qkv else 1
    counts = {"q_proj": group * dim, "k_proj": dim, "v_proj": dim}
    begin = 0
    for name, count in counts.items():
        count *= a.num_kv_heads // blocks
        yield f"self_attn.{name}", Rows(begin, count, whole // blocks), whole
        begin += count
