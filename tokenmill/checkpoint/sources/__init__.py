"""Where models come from. `resolve` turns MODEL (path, alias or Hugging Face id) into a path; every verb calls it.

The table below is the order in which sources are asked: what exists on disk wins, then aliases, then the Hub. One more
source is one more file and one more line here. Imports no torch.
"""

from __future__ import annotations

from tokenmill.checkpoint.sources.aliases import Alias, load_aliases
from tokenmill.checkpoint.sources.base import Options, Resolved, Source
from tokenmill.checkpoint.sources.cache import cache_root, find_cached
from tokenmill.errors import UserError, unknown_name
from tokenmill.registry import Registry

__all__ = ["Alias", "Resolved", "aliases", "cache_root", "list_cached", "list_downloaded", "resolve"]

SOURCES = Registry(
    "model source",
    {
        "local": "tokenmill.checkpoint.sources.local:LocalSource",
        "package": "tokenmill.checkpoint.sources.packages:PackageSource",
        "missing": "tokenmill.checkpoint.sources.local:MissingPath",
        "hub": "tokenmill.checkpoint.sources.hub:HubSource",
    },
)


def resolve(
    model: str, *, progress: bool | None = None, revision: str | None = None, offline: bool = False
) -> Resolved:
    """Find `model`, downloading it once if it must be.

    `progress`: None shows a bar on a terminal and plain lines elsewhere, False is silent. `revision` is for Hugging
    Face ids. `offline` uses only what is on this disk. Raises UserError; UnavailableError if no source can be reached.
    """
    options = Options(progress, revision, offline)
    for name in SOURCES:
        source: Source = SOURCES.get(name)()
        if source.claims(model):
            return source.resolve(model, options)
    error = unknown_name("model", model, load_aliases())
    raise UserError(error.problem, f"{error.remedy}; or give a path, or a Hugging Face id such as org/name")


def aliases() -> dict[str, Alias]:
    """The models we know by a short name, with their licence and size."""
    return load_aliases()


def list_cached() -> dict[str, Resolved]:
    """Alias -> where it lies, for those that are here. Never uses the network."""
    copies = {alias.name: find_cached(alias) for alias in load_aliases().values()}
    return {name: cached for name, cached in copies.items() if cached is not None}


def list_downloaded() -> dict[str, Resolved]:
    """As list_cached, and what lies in the Hugging Face cache, by its id."""
    from tokenmill.checkpoint.sources.hub import find_downloaded

    return list_cached() | find_downloaded()
