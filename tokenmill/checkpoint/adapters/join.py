"""Adapters of matrices that a file joins, as one adapter of the joined matrix: what PEFT can load for such a family.

The engine trains q, k and v apart even where a file keeps them as one. Their factors side by side are exactly an
adapter of the whole: A stacked, B in the rows of each part and zero elsewhere; its rank is the sum. The inverse of the
cutting in fit.py. Called before an adapter is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from tokenmill.checkpoint.adapters.adapter import Adapter, AdapterMatrix
from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.safetensors import SafetensorsCheckpoint
from tokenmill.checkpoint.tensor_views import FUSED_GATE_UP, FUSED_QKV, TensorView


def joined_as_stored(adapter: Adapter, checkpoint: Checkpoint) -> Adapter:
    """`adapter` is in canonical names and Hugging Face's row order, without DoRA; `checkpoint` is its base. A GGUF
    joins by rules of its own, which say nothing of Hugging Face's modules: its adapters stay apart."""
    views = checkpoint.joined if isinstance(checkpoint, SafetensorsCheckpoint) else {}
    matrices: dict[str, AdapterMatrix] = {}
    groups: dict[str, list[AdapterMatrix]] = {}
    for name, matrix in adapter.matrices.items():
        if name in views:
            groups.setdefault(_whole(name), []).append(matrix)
        else:
            matrices[name] = matrix
    return replace(adapter, matrices=matrices | {name: _joined(name, parts, views) for name, parts in groups.items()})


def _whole(name: str) -> str:
    layer = ".".join(name.split(".")[:3])
    return f"{layer}.{FUSED_QKV if '.self_attn.' in name else FUSED_GATE_UP}"


def _joined(name: str, parts: list[AdapterMatrix], views: Mapping[str, TensorView]) -> AdapterMatrix:
    total = views[parts[0].name].total_rows
    b = torch.zeros(total, sum(part.rank for part in parts))
    at = 0
    for part in parts:
        rows = views[part.name].rows
        assert rows is not None
        assert part.magnitude is None, part.name
        places = torch.arange(total).view(-1, rows.period)[:, rows.begin : rows.begin + rows.count].flatten()
        b[places, at : at + part.rank] = part.b * part.scale
        at += part.rank
    return AdapterMatrix(name, torch.cat([part.a for part in parts]), b, 1.0)
