"""The record of one request's time in the engine. Part of the vocabulary, as types.py is; imports nothing."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class PromptChunk:
    """A part of a prompt that one step computed, on the monotonic clock."""

    began: float
    ended: float
    start: int  # token offset in the prompt
    count: int
    num_rows: int  # sequences in the step


@dataclass(slots=True)
class Timeline:
    """When the engine did what for a request, on the monotonic clock, which its processes share."""

    queued: float = 0.0  # came to the scheduler; with structured output, when its grammar was compiled
    chunks: list[PromptChunk] = field(default_factory=list)  # up to the first token
    num_chunks: int = 0  # may be more than are listed: the last one then stands for several
    num_preemptions: int = 0
