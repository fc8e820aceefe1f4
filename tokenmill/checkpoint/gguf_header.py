"""The header of a GGUF file (version 2 and 3, little endian), and its metadata without the tensors.

Imports no torch: the server process reads vocabularies and chat templates through it. gguf.py goes on from here to the
tensors.
"""

from __future__ import annotations

from pathlib import Path

from tokenmill.checkpoint.gguf_metadata import Cursor, Metadata, read_metadata, read_raw_pairs
from tokenmill.checkpoint.mapped_file import DAMAGED, map_file
from tokenmill.errors import CheckpointError

MAGIC = b"GGUF"
HEADER_BYTES = 4 + 4 + 8 + 8


def is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf_metadata(path: Path) -> Metadata:
    """The metadata alone, whatever the architecture: a vocabulary is readable where the model is not."""
    cursor = Cursor(map_file(path, HEADER_BYTES), path.name)
    _, num_pairs = read_header(cursor)
    return read_metadata(cursor, num_pairs)


def read_gguf_raw_pairs(path: Path) -> dict[str, bytes]:
    """The metadata as bytes, for a copy of the file with other tensors."""
    cursor = Cursor(map_file(path, HEADER_BYTES), path.name)
    _, num_pairs = read_header(cursor)
    return read_raw_pairs(cursor, num_pairs)


def read_header(cursor: Cursor) -> tuple[int, int]:
    """(tensors, metadata entries)."""
    if cursor.buffer[:4] != MAGIC:
        raise CheckpointError(f"{cursor.label} is not a GGUF file", "give a .gguf file or a safetensors directory")
    cursor.position = 4
    version = cursor.u32()
    if version == 1:
        raise CheckpointError(f"{cursor.label} is GGUF version 1", "convert it again with a current llama.cpp")
    if version and version & 0xFFFF == 0:
        raise CheckpointError(f"{cursor.label} is a big-endian GGUF", "convert it with gguf-convert-endian first")
    if version not in (2, 3):
        raise CheckpointError(f"{cursor.label} is GGUF version {version}, we read 2 and 3", DAMAGED)
    return cursor.u64(), cursor.u64()
