"""Files of a model in the known roundings, made once and kept in the cache folder: what an endpoint is compared with.

GGUF mixes by their names, rounded to nearest, without calibration and without a gate: they are yardsticks, not
deployments. Called by `tokenmill eval endpoint`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tokenmill import __version__
from tokenmill.checkpoint.identity import model_hash
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.sources.base import readable_bytes
from tokenmill.checkpoint.sources.cache import cache_root
from tokenmill.errors import UserError
from tokenmill.quantize.ggml.export import plan_gguf, quantize_gguf
from tokenmill.quantize.ggml.mixes import find_mix


class RoundingFiles:
    """The roundings of one model. A name that is a path to a file stands for that file."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._folder: Path | None = None

    def find(self, name: str) -> Path:
        if name.endswith(".gguf") or "/" in name:
            path = Path(name)
            if not path.exists():
                raise UserError(f"there is no file {name}", "check --candidates")
            return path
        mix = find_mix(name.upper()).name
        if self._folder is None:
            self._folder = cache_root() / "roundings" / f"{model_hash(self._source)[:16]}-{__version__}"
        path = self._folder / f"{mix}.gguf"
        if not path.is_file():
            self._make(mix, path)
        return path

    def _make(self, mix: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint = open_checkpoint(self._source)
        needed, free = plan_gguf(checkpoint, mix).nbytes, shutil.disk_usage(path.parent).free
        if needed > free:
            raise UserError(
                f"{mix} needs {readable_bytes(needed)} in {path.parent}, {readable_bytes(free)} are free",
                "make room, set TOKENMILL_CACHE to a larger disk, or give fewer --candidates",
            )
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            quantize_gguf(checkpoint, partial, mix)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
