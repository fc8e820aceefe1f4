"""Packages that `pip install tokenmill` leaves out: which extra brings a module, and what a verb says without it.

Knows the extras of pyproject.toml by the modules they bring, not what those are used for. Called by main.py alone: a
verb simply imports what it needs.
"""

from __future__ import annotations

from collections.abc import Sequence

EXTRAS = {
    "torch": ("torch",),
    "serve": ("fastapi", "starlette", "uvicorn", "uvloop", "httptools", "msgspec", "zmq", "prometheus_client"),
    "gpu": ("triton", "pynvml"),
    "otel": ("opentelemetry",),
    "redis": ("redis",),
    "ray": ("ray",),
}
_GROUPS = ("bench", "eval", "ray")  # verbs with a second word


def missing_extra(error: ModuleNotFoundError, arguments: Sequence[str]) -> tuple[str, str] | None:
    """The problem and the remedy for whoever typed `arguments`; None: the module belongs to no extra, our bug."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        if module in modules:
            needed = f"tokenmill[{extra}]"
            return f"{_verb(arguments)} needs {needed}", f"pip install '{needed}'"
    return None


def _verb(arguments: Sequence[str]) -> str:
    words = [word for word in arguments if not word.startswith("-")]
    return " ".join(words[: 2 if words[:1] and words[0] in _GROUPS else 1]) or "tokenmill"
