"""Writes what `convert` has planned: a safetensors directory or a GGUF, a block at a time.

Codes are repacked by the file formats (or into ggml blocks), floats are expanded tile by tile. Decides nothing: the
plan says how each matrix is converted. Used by convert.py.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tokenmill.checkpoint.configs.tensor_names import naming_of, stored_name
from tokenmill.checkpoint.gguf_export import derived_tensors, export_metadata, export_tensors
from tokenmill.checkpoint.gguf_writer import GGUFWriter, TensorSlot
from tokenmill.checkpoint.hf_export import export_tokenizer, generation_config, to_gguf_layout
from tokenmill.checkpoint.safetensors import read_json
from tokenmill.model.formats.files.base import FileFormat
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.quantize.convert_source import ConvertSource
from tokenmill.quantize.ggml.codes import encode_blocks
from tokenmill.quantize.ggml.mixes import MIXES
from tokenmill.quantize.output import float_config
from tokenmill.quantize.shards import join_files

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MXFP4_FILE_TYPE = 38  # llama.cpp's number for files of MXFP4
_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Move:
    """How one matrix is converted. `scheme`: of the copied codes; None: it is written as floats."""

    prefix: str
    stored: str  # its type in the source, for messages
    becomes: str  # in the output: a float type, a ggml type, or the name of a scheme
    scheme: Scheme | None = None
    lost: tuple[str, ...] = ()
    half_scales: bool = False  # scales that float16 does not hold are rounded to it


@dataclass(frozen=True, slots=True)
class ConvertPlan:
    moves: list[Move]
    file_format: type[FileFormat] | None  # None: plain safetensors, or a GGUF
    dtype: torch.dtype | None  # of unquantized tensors; None: as stored

    def counts(self) -> dict[str, int]:
        return dict(Counter(f"{move.stored} to {move.becomes}" for move in self.moves).most_common())

    def bytes_of(self, source: ConvertSource) -> int:
        """Approximate size of the output in bytes."""
        bits = {"F32": 32, "F16": 16, "BF16": 16}
        sizes = ((move, math.prod(source.shape(move.prefix))) for move in self.moves)
        return sum(
            int(size * (bits[move.becomes] if move.scheme is None else move.scheme.bits_per_weight + 1) / 8)
            for move, size in sizes
        )


def write_directory(source: ConvertSource, plan: ConvertPlan, directory: Path) -> None:
    config = _config(source, plan)  # first: it may be refused
    parts = directory / "parts"
    parts.mkdir(parents=True)
    files = []
    for number, tensors in enumerate(_by_block(source, plan)):
        files.append(parts / f"{number:05d}.safetensors")
        save_file(tensors, files[-1])
    join_files(files, directory, rename=_rename(source))
    shutil.rmtree(parts)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", _generation(source))
    export_tokenizer(source.checkpoint, directory)


def _by_block(source: ConvertSource, plan: ConvertPlan) -> Iterator[dict[str, Tensor]]:
    """The output's tensors: the edges, then one block at a time."""
    moves: dict[str, list[Move]] = {}
    for move in plan.moves:
        moves.setdefault(_block_of(move.prefix), []).append(move)
    vectors: dict[str, list[str]] = {}
    for name in source.vectors:
        vectors.setdefault(_block_of(name), []).append(name)
    for block in dict.fromkeys([*moves, *vectors]):
        tensors: dict[str, Tensor] = {}
        for move in moves.get(block, ()):
            tensors |= {f"{move.prefix}.{suffix}": part for suffix, part in _encoded(source, plan, move).items()}
            source.release(move.prefix)
        for name in vectors.get(block, ()):
            dtype = source.stored_dtype(name) if plan.dtype is None else plan.dtype
            tensors[name] = source.vector(name).to(dtype)
        yield {name: tensor.contiguous() for name, tensor in tensors.items()}


def _block_of(name: str) -> str:
    return ".".join(name.split(".")[:3]) if name.startswith("model.layers.") else ""


def _encoded(source: ConvertSource, plan: ConvertPlan, move: Move) -> dict[str, Tensor]:
    if move.scheme is None:
        return {"weight": _expanded(source, move)}
    assert plan.file_format is not None
    return plan.file_format.encode(_moved(source.codes(move.prefix), move))


def _moved(matrix: QuantizedMatrix, move: Move) -> QuantizedMatrix:
    """The matrix under the scheme of the move: explicit zero points, input scale and scale precision as it says."""
    assert move.scheme is not None
    zeros = matrix.zeros
    if zeros is None and not move.scheme.symmetric:
        zeros = torch.full_like(matrix.scales, 2.0 ** (move.scheme.bits - 1))
    scales = matrix.scales.half().float() if move.half_scales else matrix.scales
    input_scale = None if move.scheme.activations == "none" else matrix.input_scale
    return replace(matrix, scheme=move.scheme, scales=scales, zeros=zeros, input_scale=input_scale)


def _expanded(source: ConvertSource, move: Move) -> Tensor:
    values = torch.empty(source.shape(move.prefix), dtype=_PLAIN[move.becomes])
    for begin, end in source.tiles(move.prefix):
        values[begin:end] = source.floats(move.prefix, begin, end)
    return values


def _config(source: ConvertSource, plan: ConvertPlan) -> dict[str, Any]:
    stored = source.checkpoint.path / "config.json"
    config = read_json(stored) if stored.is_file() else {}
    dense = [move for move in plan.moves if move.scheme is None]
    name = str(_PLAIN[dense[0].becomes]).removeprefix("torch.")
    if not config or "text_config" in config:  # a GGUF, or the text part of a larger model
        config = float_config(source.checkpoint, source.description, name)
    elif plan.dtype is not None or "dtype" not in config:
        config |= {"dtype": name, "torch_dtype": name}
    config.pop("quantization_config", None)
    if not source.description.tie_embeddings and source.checkpoint.description.tie_embeddings:
        config["tie_word_embeddings"] = False  # an adapter has changed one of the two
    if plan.file_format is not None:
        rename = _rename(source)
        schemes = {rename(move.prefix): move.scheme for move in plan.moves if move.scheme is not None}
        layers = [rename(move.prefix) for move in dense if _block_of(move.prefix)]
        ignored = [*([] if _HEAD in schemes else [_HEAD]), *layers]
        config["quantization_config"] = plan.file_format.quantization_config(schemes, ignored)
    return config


def _rename(source: ConvertSource) -> Callable[[str], str]:
    """Canonical names -> those of the family's own files."""
    return partial(stored_name, naming_of(source.description.architecture))


def _generation(source: ConvertSource) -> dict[str, Any]:
    stored = source.checkpoint.path / "generation_config.json"
    return read_json(stored) if stored.is_file() else generation_config(source.description)


def write_gguf(source: ConvertSource, plan: ConvertPlan, path: Path) -> None:
    moves = {f"{move.prefix}.weight": move for move in plan.moves}
    shapes: dict[str, tuple[int, ...]] = {name: source.shape(move.prefix) for name, move in moves.items()}
    shapes |= {name: tuple(source.vector(name).shape) for name in source.vectors}
    tensors = export_tensors(source.checkpoint, shapes)
    slots = [
        TensorSlot(tensor.name, tensor.shape, moves[tensor.source].becomes if tensor.source in moves else "F32")
        for tensor in tensors
    ]
    with GGUFWriter(path, export_metadata(source.checkpoint, _file_type(plan)), slots) as writer:
        for tensor in tensors:
            if not tensor.source:
                rows = torch.tensor(derived_tensors(source.description)[tensor.name])
                writer.append(rows.contiguous().view(torch.uint8))
                continue
            for name in (tensor.source, *tensor.rest):
                for rows in _rows(source, name, moves.get(name)):
                    writer.append(rows.contiguous().view(torch.uint8))


def _rows(source: ConvertSource, name: str, move: Move | None) -> Iterator[Tensor]:
    description = source.description
    if move is None:
        yield to_gguf_layout(name, source.vector(name), description).view(1, -1)
    elif move.scheme is None:
        for begin, end in source.tiles(move.prefix):
            rows = to_gguf_layout(name, source.floats(move.prefix, begin, end), description)
            yield rows.to(_PLAIN[move.becomes])
        source.release(move.prefix)
    else:
        matrix = _moved(source.codes(move.prefix), move)
        codes, scales = (
            to_gguf_layout(name, matrix.codes, description),
            to_gguf_layout(name, matrix.scales, description),
        )
        zeros = None if matrix.zeros is None else to_gguf_layout(name, matrix.zeros, description)
        yield encode_blocks(move.becomes, replace(matrix, codes=codes, scales=scales, zeros=zeros))
        source.release(move.prefix)


def _file_type(plan: ConvertPlan) -> int:
    """The most common type names the file."""
    common = Counter(move.becomes for move in plan.moves if _block_of(move.prefix)).most_common(1)[0][0]
    return MIXES[common].file_type if common in MIXES else _MXFP4_FILE_TYPE


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
