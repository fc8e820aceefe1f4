"""One request of a serving benchmark: what datasets and traces make, and the load generator sends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """`timestamp` is in seconds since the first request of a trace; 0 elsewhere."""

    prompt: str | list[int]
    prompt_len: int  # 0: only the server knows
    output_len: int
    timestamp: float = 0.0
