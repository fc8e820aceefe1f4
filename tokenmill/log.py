"""Logging to stderr, so that stdout stays one JSON object or plain text.

Quiet by default (warnings); `TOKENMILL_LOG=info` or `--verbose` shows automatic choices. Never logs prompt text.
"""

from __future__ import annotations

import logging
import os
import sys

_ROOT = "tokenmill"


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")


def configure(level: str | None = None) -> None:
    """Install one stderr handler. Idempotent: a second call only changes the level."""
    root = logging.getLogger(_ROOT)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname).1s %(name)s: %(message)s"))
        root.addHandler(handler)
        root.propagate = False
    root.setLevel((level or os.environ.get("TOKENMILL_LOG", "warning")).upper())
