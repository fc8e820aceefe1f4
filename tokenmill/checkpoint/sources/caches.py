"""Models in the caches of this disk, our own and the Hub's: how much of one is here, and its deletion. Never touches a
path that the user named."""

from __future__ import annotations

import shutil
from pathlib import Path

from tokenmill.checkpoint.sources.aliases import load_aliases
from tokenmill.checkpoint.sources.cache import exclusive, model_folder
from tokenmill.checkpoint.sources.hub import cached_repositories
from tokenmill.errors import UserError, unknown_name


def bytes_here(model: str) -> tuple[int, int]:
    """(bytes on this disk, bytes of the whole model or 0 if that is not known), while it is being fetched."""
    alias = load_aliases().get(model)
    folder = folder_of(model)
    if folder is None:
        return 0, 0
    return sum(size for _, size in _files(folder)), alias.bytes if alias is not None else 0


def remove(model: str) -> int:
    """Delete a cached model by its alias or Hugging Face id; returns the bytes that it took. Raises UserError."""
    folder = folder_of(model)
    if folder is None:
        raise unknown_name("cached model", model, {*load_aliases(), *cached_repositories()})
    if not folder.is_dir():
        raise UserError(f"'{model}' is not in the cache", "`tokenmill list` shows what is")
    freed = sum(size for _, size in _files(folder))
    try:
        with exclusive(folder, lambda: None):  # a download that is under way ends first
            shutil.rmtree(folder)
    except OSError as error:
        raise UserError(f"cannot delete {folder}: {error.strerror}", "check its permissions") from None
    return freed


def folder_of(model: str) -> Path | None:
    """That of an alias or of a Hugging Face id; None: it is neither, or not here."""
    alias = load_aliases().get(model)
    return model_folder(alias) if alias is not None else cached_repositories().get(model)


def _files(folder: Path) -> list[tuple[Path, int]]:
    """With their sizes; those that go away meanwhile are left out."""
    found = []
    for path in folder.rglob("*"):
        try:
            if path.is_file() and not path.is_symlink():
                found.append((path, path.stat().st_size))
        except OSError:
            continue
    return found
