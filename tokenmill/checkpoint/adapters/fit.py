"""Brings an adapter onto a base: canonical names, fused matrices cut, rows in the order of the base's file.

Everything that the base lacks or that has another shape is refused here, by name, before anything computes with it.
Adapters are always in Hugging Face's layout; a GGUF of a Llama keeps the rows of q and k in another order, so those of
the adapter's outputs are reordered too. Called by whoever has read an adapter and knows its base.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tokenmill.checkpoint.adapters.adapter import EMBEDDING, Adapter, AdapterMatrix
from tokenmill.checkpoint.configs.tensor_names import canonical, naming_of
from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.fields import shown
from tokenmill.checkpoint.hf_export import to_hf_layout
from tokenmill.checkpoint.mapped_tensor import take_view
from tokenmill.checkpoint.matrices import edge_matrices, layer_matrices
from tokenmill.checkpoint.tensor_views import TensorView, split_fused
from tokenmill.errors import CheckpointError, UserError

HEAD = "lm_head"
_ROTATED = re.compile(r"model\.layers\.\d+\.self_attn\.[qk]_proj")
_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.\d+\.(\w+)")
# Wrappers of text models: how their modules are called inside.
_WRAPPERS = (
    ("language_model.model.", "model."),
    ("language_model.lm_head", "lm_head"),
    ("model.language_model.", "model."),
)
_MAX_SHOWN = 3


def check_rank(adapter: Adapter, limit: int) -> None:
    """Refuse an adapter of a higher rank than `limit`."""
    for matrix in adapter.matrices.values():
        if matrix.rank > limit:
            raise UserError(
                f"adapter '{adapter.name}' has rank {matrix.rank} ({matrix.name}), the limit is {limit}",
                "raise the limit, or use an adapter of a lower rank",
            )


def check_base(adapter: Adapter, description: ModelDescription, base_hash: str = "") -> Adapter:
    """The adapter as it applies to a base of this description; refused by name where it does not.

    `base_hash`: of the base's files (checkpoint/identity.py), compared if the adapter states one.
    """
    if base_hash and adapter.base_hash and base_hash != adapter.base_hash:
        raise _other_base(adapter, description, f"it states a base of hash {adapter.base_hash[:12]}, not this one")
    shapes = module_shapes(description)
    matrices: dict[str, AdapterMatrix] = {}
    saved: dict[str, Tensor] = {}
    of: dict[str, str] = {}  # what it is called here -> in the adapter
    for matrix in adapter.matrices.values():
        for part in _parts(matrix, description):
            _check_once(adapter, of, part.name, matrix.name)
            matrices[part.name] = part
    for name, tensor in adapter.saved.items():
        for part_name, rows in _split(_canonical(name, description), tensor, description).items():
            _check_once(adapter, of, part_name, name)
            saved[part_name] = rows
    unknown = [name for name in matrices if _shape_of(name, shapes) is None]
    if unknown:
        more = f" and {len(unknown) - _MAX_SHOWN} more" if len(unknown) > _MAX_SHOWN else ""
        raise _other_base(adapter, description, f"the base has no {', '.join(unknown[:_MAX_SHOWN])}{more}")
    for name, matrix in matrices.items():
        if matrix.shape != _shape_of(name, shapes):
            raise _other_base(
                adapter, description, f"{name} is {list(matrix.shape)} there and {_listed(name, shapes)} in the base"
            )
    for name, tensor in saved.items():
        _check_saved(adapter, description, name, tensor, shapes)
    twice = [name for name in matrices if f"{name}.weight" in saved]
    if twice:
        raise CheckpointError(f"adapter '{adapter.name}' both changes and replaces {twice[0]}", "save it again")
    return replace(
        adapter,
        matrices={name: _in_row_order(matrix, description) for name, matrix in matrices.items()},
        saved={name: _rows(name.removesuffix(".weight"), each, description) for name, each in saved.items()},
    )


def _check_once(adapter: Adapter, of: dict[str, str], name: str, theirs: str) -> None:
    """Refuse what is changed twice: by a fused matrix and one of its parts, or under two names."""
    if name in of:
        problem = f"adapter '{adapter.name}' changes {name} twice: as {shown(of[name])} and as {shown(theirs)}"
        raise CheckpointError(problem, "merge one of the two, or train them as one adapter")
    of[name] = theirs


def module_shapes(description: ModelDescription) -> dict[str, tuple[int, int]]:
    """(out, in) of every matrix that an adapter may change, by canonical module; experts without their number. Of tied
    models too an adapter may change the head alone, or the embedding alone."""
    shapes = {HEAD: (description.vocab_size, description.hidden_size)}
    shapes |= {each.name: (each.outputs, each.inputs) for each in edge_matrices(description) if each.part != "vision"}
    for number, layer in enumerate(description.layers):
        for each in layer_matrices(description.hidden_size, layer):
            shapes[f"model.layers.{number}.{each.name}"] = (each.outputs, each.inputs)
    return shapes


def _shape_of(name: str, shapes: dict[str, tuple[int, int]]) -> tuple[int, int] | None:
    match = _EXPERT.fullmatch(name)
    return shapes.get(f"{match[1]}.{match[2]}" if match else name)


def _listed(name: str, shapes: dict[str, tuple[int, int]]) -> list[int]:
    return list(_shape_of(name, shapes) or ())


def _check_saved(
    adapter: Adapter,
    description: ModelDescription,
    name: str,
    tensor: Tensor,
    shapes: dict[str, tuple[int, int]],
) -> None:
    module, _, leaf = name.rpartition(".")
    expected = shapes.get(module) if leaf == "weight" else None
    is_norm = module == "model.norm" or module.endswith("norm")
    if expected is None and not (is_norm and leaf in ("weight", "bias")):
        tied = module == HEAD and description.tie_embeddings
        what = (
            f"the head is the embedding there, and the adapter replaces {HEAD}" if tied else f"the base has no {name}"
        )
        raise _other_base(adapter, description, what)
    if expected is not None and tuple(tensor.shape) != expected:
        what = f"{name} is {list(tensor.shape)} there and {list(expected)} in the base"
        raise _other_base(adapter, description, what)


def _other_base(adapter: Adapter, description: ModelDescription, why: str) -> CheckpointError:
    made_for = f" (made for {shown(adapter.base_name)})" if adapter.base_name else ""
    return CheckpointError(
        f"adapter '{adapter.name}'{made_for} does not fit base '{description.name or description.model_type}': {why}",
        "give the base that the adapter was trained on",
    )


def _canonical(name: str, description: ModelDescription) -> str:
    """The canonical name of a tensor ("...weight")."""
    for theirs, ours in _WRAPPERS:
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
            break
    found = canonical(naming_of(description.architecture), name)
    return name if found is None else found.name


def _parts(matrix: AdapterMatrix, description: ModelDescription) -> Iterator[AdapterMatrix]:
    """The adapter of a matrix under its canonical name; of a fused matrix one for each that it joins."""
    name = _canonical(f"{matrix.name}.weight", description)
    magnitudes = {} if matrix.magnitude is None else _split(name, matrix.magnitude, description)
    for part, b in _split(name, matrix.b, description).items():
        yield replace(matrix, name=part.removesuffix(".weight"), b=b, magnitude=magnitudes.get(part))


def _split(name: str, rows: Tensor, description: ModelDescription) -> dict[str, Tensor]:
    """Rows of a matrix by the canonical tensors they belong to: more than one where the file's matrix is fused."""
    grouped = naming_of(description.architecture).grouped_qkv
    views = split_fused(description, {name: TensorView((name,))}, grouped)
    totals = {view.total_rows for view in views.values() if view.rows is not None}
    if totals and totals != {rows.shape[0]}:  # of another shape: named by the caller
        return {name: rows}
    return {part: take_view(view, [rows]) for part, view in views.items()}


def _in_row_order(matrix: AdapterMatrix, description: ModelDescription) -> AdapterMatrix:
    magnitude = None if matrix.magnitude is None else _rows(matrix.name, matrix.magnitude, description)
    return replace(matrix, b=_rows(matrix.name, matrix.b, description), magnitude=magnitude)


def _rows(module: str, rows: Tensor, description: ModelDescription) -> Tensor:
    """Rows in Hugging Face's order -> in that of the base's file."""
    if not description.rope_interleaved or not _ROTATED.fullmatch(module):
        return rows.contiguous()
    # to_hf_layout says where each of our rows goes: its inverse is wanted.
    goes = to_hf_layout(f"{module}.weight", torch.arange(rows.shape[0]), description)
    ours = torch.empty_like(rows, memory_format=torch.contiguous_format)
    ours[goes] = rows
    return ours


def is_edge(name: str) -> bool:
    """Whether a matrix is the embedding or the head: looked up, or multiplied once a token."""
    return name in (EMBEDDING, HEAD)
