"""`tokenmill list` and `tokenmill rm`: the models in the caches of this disk, as Ollama's users expect them."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill.cli.options import AsJson, Verbose
from tokenmill.cli.output import emit
from tokenmill.cli.screens.models import list_screen, removed_screen


def list_models(as_json: AsJson = False, _verbose: Verbose = False) -> None:
    """Show the models on this disk: those that `pull` fetched, and complete ones in the Hugging Face cache."""
    from tokenmill.checkpoint.sources import list_downloaded

    rows = [
        {"name": name, "bytes": found.bytes, "source": found.source, "path": str(found.path)}
        for name, found in sorted(list_downloaded().items())
    ]
    emit({"models": rows}, as_json, lambda: list_screen({"models": rows}))


def remove_model(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Aliases or Hugging Face ids.")],
    as_json: AsJson = False,
    _verbose: Verbose = False,
) -> None:
    """Delete models from the caches of this disk. Paths that you named yourself are never touched."""
    from tokenmill.checkpoint.sources.caches import remove

    freed = {model: remove(model) for model in models}
    emit({"removed": freed}, as_json, lambda: removed_screen({"removed": freed}))
