"""Sizes, token counts and times as people write them. Read by config.py and by flags that are not options."""

from __future__ import annotations

import re

from tokenmill.errors import UserError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_MILLISECONDS = {"": 1.0, "ms": 1.0, "s": 1e3}


def parse_size(text: str | int) -> int:
    """Bytes: "6GiB", "500MB", "2g", or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(text).lower())
    if not match or match[2] not in _UNITS:
        raise UserError(f"'{text}' is not a size", "write it like 6GiB, 500MB or 1000000")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_count(text: str | int) -> int:
    """A number of tokens: "8k" means 8192, "32000" means itself."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(k?)\s*", str(text).lower())
    if not match:
        raise UserError(f"'{text}' is not a token count", "write it like 4096 or 8k")
    return int(float(match[1]) * (1024 if match[2] else 1))


def parse_milliseconds(text: str) -> float:
    """Milliseconds: "40ms", "0.04s", or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|)\s*", text.lower())
    if not match:
        raise UserError(f"'{text}' is not a time", "write it like 40ms or 0.5s")
    return float(match[1]) * _MILLISECONDS[match[2]]
