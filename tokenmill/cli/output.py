"""Prints a result on stdout, as one JSON object or as the verb's screen, and an error on stderr.

The only place that writes results. Knows nothing of what it prints: a result is a mapping of plain values, a screen is
made from it by cli/screens. Called by every verb.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tokenmill.cli.render.screen import Result, Screen


def emit(result: Result, as_json: bool, screen: Callable[[], Screen]) -> None:
    """`screen` is only made where a person reads it."""
    if as_json:
        print_json(result)
        return
    from tokenmill.cli.render.draw import show

    sys.stdout.flush()
    show(screen(), sys.stdout)


def print_json(result: Result) -> None:
    print(json.dumps(_finite(result), allow_nan=False), flush=True)


def print_error(message: str, remedy: str) -> None:
    """`error: MESSAGE` and `try: REMEDY` on stderr, one line each; in colour on a terminal."""
    lines = [("error:", "bold red", message), *([("try:", "bold yellow", remedy)] if remedy else [])]
    if not sys.stderr.isatty():
        for label, _, text in lines:
            print(label, " ".join(text.split()), file=sys.stderr)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    for label, style, text in lines:
        console.print(Text.assemble((label, style), " ", " ".join(text.split())), soft_wrap=True)


def _finite(value: Any) -> Any:
    """JSON has no infinity: such numbers become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value
