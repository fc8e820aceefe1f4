"""Hashes that identify the model and the tokens of a stored result.

The hash of the model is checkpoint/identity.py's. Called by the reference cache and the gate's report.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from tokenmill.checkpoint.identity import file_hash, model_hash
from tokenmill.evaluate.windows import Window

__all__ = ["file_hash", "model_hash", "windows_hash"]


def windows_hash(windows: Sequence[Window]) -> str:
    """sha256 over the tokens and over which of them are scored: text, tokenizer, context and protocol in one."""
    digest = hashlib.sha256()
    for window in windows:
        digest.update(np.array([len(window.token_ids), window.first, *window.token_ids], dtype="<i8").tobytes())
    return digest.hexdigest()
