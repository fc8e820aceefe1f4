"""Whether and where progress is shown: a console on stderr if that is a terminal, none otherwise."""

from __future__ import annotations

import os
import sys

from rich.console import Console


def progress_console() -> Console | None:
    """None where a bar would only clutter a log: not a terminal, or bars switched off by TQDM_DISABLE."""
    if os.environ.get("TQDM_DISABLE", "") not in ("", "0") or not sys.stderr.isatty():
        return None
    return Console(stderr=True)
