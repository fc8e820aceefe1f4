"""Which model is this: a hash over the bytes of its files, read once and remembered by path, size and time of change.

For results that outlive a run and must not be taken for another model's: stored references, KV pages in tiers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

from tokenmill.checkpoint.sources.cache import cache_root, write_json

_SUFFIXES = (".safetensors", ".gguf", ".bin", ".json", ".model")


def model_hash(path: Path) -> str:
    """sha256 over the names and contents of a model file, or of the files of its directory."""
    digest = hashlib.sha256()
    for file in _files(path):
        digest.update(f"{file.name if path.is_dir() else ''}:{file_hash(file)}\n".encode())
    return digest.hexdigest()


def file_hash(file: Path) -> str:
    memory = cache_root() / "references" / "hashes.json"
    stat = file.stat()
    key = f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    known = _read(memory)
    if key not in known:
        with file.open("rb") as data:
            known[key] = hashlib.file_digest(data, "sha256").hexdigest()
        with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
            memory.parent.mkdir(parents=True, exist_ok=True)
            write_json(memory, known)
    return known[key]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if file.is_file() and file.suffix in _SUFFIXES)


def _read(memory: Path) -> dict[str, str]:
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
