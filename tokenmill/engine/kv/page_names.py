"""Names of cached pages that every process can compute: from the model, how its pages are laid out, and the tokens.

The engine names the pages of its prefix tree so, tiers keep pages by name, and a router finds the replica that has a
prompt. Imports no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from tokenmill.checkpoint.identity import model_hash
from tokenmill.engine.kv.prefix_tree import child_name, salt_key

_VERSION = 1  # of how pages are computed and laid out: raise it when either changes


def root_name(path: Path, load_format: str, meaning: str) -> bytes:
    """16 bytes that are the same exactly where a page of the same tokens has the same content. Reads the whole model if
    its hash is not known yet. `meaning`: of page_meaning in engine/tiers.py."""
    weights = f"dummy of {model_hash(path)}" if load_format == "dummy" else model_hash(path)
    return hashlib.sha256(f"{_VERSION!r}\n{weights!r}\n{meaning}".encode()).digest()[:16]


def salted_root(root: bytes, salt: bytes) -> bytes:
    """What the names of pages under a salt hang from."""
    return child_name(root, salt_key(salt)) if salt else root


def page_names(root: bytes, token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """The names of all full pages of a sequence."""
    names, name = [], root
    for end in range(page_size, len(token_ids) + 1, page_size):
        name = child_name(name, tuple(token_ids[end - page_size : end]))
        names.append(name)
    return names
