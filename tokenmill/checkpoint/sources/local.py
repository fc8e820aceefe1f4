"""Models that lie on this disk: a directory, a `.gguf`, or any file. First of the sources: an existing path wins.

Does not look inside; the checkpoint readers do.
"""

from __future__ import annotations

import os
from pathlib import Path

from tokenmill.checkpoint.sources.base import Options, Resolved, size_on_disk
from tokenmill.errors import UserError


class LocalSource:
    def claims(self, model: str) -> bool:
        return os.path.exists(os.path.expanduser(model))

    def resolve(self, model: str, options: Options) -> Resolved:
        if options.revision is not None:
            raise UserError(f"a revision was given for the local path '{model}'", "revisions are for Hugging Face ids")
        path = Path(model).expanduser().resolve()
        try:
            return Resolved(path, size_on_disk(path), "local")
        except OSError as error:
            raise UserError(f"cannot read '{model}': {error.strerror}", "check its permissions") from error


class MissingPath:
    """Claims names that can only be paths, to report them instead of asking the Hub. Last source before the Hub."""

    def claims(self, model: str) -> bool:
        return _means_path(model)

    def resolve(self, model: str, options: Options) -> Resolved:  # noqa: ARG002
        raise UserError(f"there is no file or directory '{model}'", _nearest_existing(Path(model).expanduser()))


def _means_path(model: str) -> bool:
    if model.startswith(("/", "./", "../", "~", ".\\", "..\\")) or model in (".", ".."):
        return True
    # org/repo/file.gguf names a file on the Hub; shorter ones are files here
    return model.endswith(".gguf") and model.count("/") < 2


def _nearest_existing(path: Path) -> str:
    for parent in path.absolute().parents:
        if parent.is_dir():
            if parent == path.absolute().parent:
                return f"'{parent}' exists but holds no '{path.name}'"
            return f"of that path only '{parent}' exists"
    return "check the spelling"
