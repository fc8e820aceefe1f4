"""`tokenmill pull`: download a model into the cache, or find it there."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill.cli.options import DEFAULT_MODEL, AsJson, Model, Verbose
from tokenmill.cli.output import emit
from tokenmill.cli.screens.pull import pull_screen


def pull(
    model: Model = DEFAULT_MODEL,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face id.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Use only what is on this disk already.")] = False,
    as_json: AsJson = False,
    _verbose: Verbose = False,
) -> None:
    """Download a model once; a second call finds it in the cache."""
    from tokenmill.checkpoint.sources import resolve

    found = resolve(model, revision=revision, offline=offline)
    result = {"path": str(found.path), "bytes": found.bytes, "source": found.source}
    emit(result, as_json, lambda: pull_screen(result, model))
