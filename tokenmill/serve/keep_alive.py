"""How long a model stays loaded after its last request, as Ollama writes it: seconds, `5m`, 0 or a negative number."""

from __future__ import annotations

import math
import re

_FOREVER = 1e18  # integers may be too large for a float
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|ms|s|m|h)")
_WHOLE = re.compile(rf"-?(?:{_PART.pattern})+")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def parse_keep_alive(value: str | int | float) -> float:
    """Seconds; infinite for a negative value: until something else needs the memory. Raises ValueError."""
    if isinstance(value, str):
        text = value.strip().lower()
        if _NUMBER.fullmatch(text):
            seconds = float(text)
        elif _WHOLE.fullmatch(text):
            seconds = sum(float(count) * _UNITS[unit] for count, unit in _PART.findall(text))
            seconds = -seconds if text.startswith("-") else seconds
        else:
            raise ValueError(f"keep_alive is '{text[:40]}': write it like 5m, 90s, 0 or -1")
    elif isinstance(value, bool) or value != value:
        raise ValueError("keep_alive is no duration: write it like 5m, 90s, 0 or -1")
    else:
        seconds = -1.0 if value < 0 else float(min(value, _FOREVER))
    return math.inf if seconds < 0 else seconds
