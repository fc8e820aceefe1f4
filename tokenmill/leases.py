"""Leases of KV pages: how two engines name what one computes for the other. Part of types.py; imports nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvLease:
    """Pages of a prompt on their way from the engine that computes it to the one that decodes. Both know its name."""

    name: str
    address: str = ""  # HOST:PORT of the page server that has them; empty on the side of that server
    ttl: float = 30.0  # seconds that they are kept for the other engine after its last sign of life
    min_tokens: int = 0  # compute the prompt where fewer tokens than these are missing
    on_demand: bool = False  # nobody computes it yet: the server asks for that once the engine says so
