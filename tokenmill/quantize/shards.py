"""Joins safetensors files into the shards of a model, by copying bytes: no tensor is loaded.

Writes model.safetensors, or numbered shards and their index, and gives the SHA-256 of each file. Used by output.py.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenmill.checkpoint.safetensors import INDEX_FILE, SINGLE_FILE

SHARD_BYTES = 4 << 30
_CHUNK = 8 << 20


@dataclass(frozen=True, slots=True)
class _Piece:
    """One tensor inside an existing file."""

    name: str
    file: Path
    start: int
    entry: dict[str, Any]  # dtype and shape, from the header

    size: int


def join_files(
    files: Sequence[Path],
    directory: Path,
    shard_bytes: int = SHARD_BYTES,
    rename: Callable[[str], str] = lambda name: name,
) -> dict[str, str]:
    """Write the tensors of `files`, in their order, into `directory`, as `rename` calls them; SHA-256 by file name."""
    pieces = [replace(piece, name=rename(piece.name)) for file in files for piece in _pieces(file)]
    shards: list[list[_Piece]] = [[]]
    for piece in pieces:
        if shards[-1] and sum(each.size for each in shards[-1]) + piece.size > shard_bytes:
            shards.append([])
        shards[-1].append(piece)
    if len(shards) == 1:
        return {SINGLE_FILE: _write(directory / SINGLE_FILE, shards[0])}
    digests: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        digests[name] = _write(directory / name, shard)
        weight_map |= {piece.name: name for piece in shard}
    index = {
        "metadata": {"total_size": sum(piece.size for piece in pieces)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return digests


def _pieces(file: Path) -> list[_Piece]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return [
        _Piece(
            name,
            file,
            8 + length + entry["data_offsets"][0],
            {"dtype": entry["dtype"], "shape": entry["shape"]},
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in sorted(header.items(), key=lambda pair: pair[1]["data_offsets"][0])
    ]


def _write(path: Path, pieces: Sequence[_Piece]) -> str:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for piece in pieces:
        header[piece.name] = {**piece.entry, "data_offsets": [offset, offset + piece.size]}
        offset += piece.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as target:

        def put(data: bytes) -> None:
            target.write(data)
            digest.update(data)

        put(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            with piece.file.open("rb") as source:
                source.seek(piece.start)
                left = piece.size
                while left:
                    data = source.read(min(_CHUNK, left))
                    left -= len(data)
                    put(data)
        target.flush()
        os.fsync(target.fileno())
    return digest.hexdigest()
