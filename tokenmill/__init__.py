"""tokenmill: takes a checkpoint and your traffic, gives back the cheapest deployment that keeps quality and latency.

`from tokenmill import LLM, Embedder, SamplingParams`; everything else is behind the `tokenmill` command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenmill.errors import UserError
from tokenmill.types import SamplingParams, StructuredSpec

if TYPE_CHECKING:
    from tokenmill.engine.async_engine import AsyncEngine
    from tokenmill.engine.beam_search import BeamSearchParams
    from tokenmill.engine.embedding.embedder import Embedder
    from tokenmill.engine.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchParams",
    "Embedder",
    "SamplingParams",
    "StructuredSpec",
    "UserError",
    "__version__",
]

_LAZY = {
    "LLM": "tokenmill.engine.llm",
    "AsyncEngine": "tokenmill.engine.async_engine",
    "BeamSearchParams": "tokenmill.engine.beam_search",
    "Embedder": "tokenmill.engine.embedding.embedder",
}


def __getattr__(name: str) -> Any:
    """Import the engine only when it is asked for: `tokenmill --help` stays instant."""
    if name in _LAZY:
        from importlib import import_module

        try:
            return getattr(import_module(_LAZY[name]), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise UserError(
                f"torch is not installed, and {name} computes with it", "pip install 'tokenmill[torch]'"
            ) from None
    raise AttributeError(f"module 'tokenmill' has no attribute '{name}'")
