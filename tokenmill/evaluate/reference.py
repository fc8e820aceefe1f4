"""The reference's log-probabilities that a candidate is compared with, from a cache file or the running model.

`open_reference` finds the cache of a model and these windows, makes it on first use, or, where it must not or cannot be
made, runs the reference beside the candidate, window by window. Called by divergence.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tokenmill import __version__
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.sources import resolve
from tokenmill.checkpoint.sources.base import readable_bytes
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.checkpoint.tokenizer_files import load_tokenizer
from tokenmill.config import EngineConfig
from tokenmill.engine.llm import LLM
from tokenmill.engine.scoring import read_logits
from tokenmill.errors import UserError
from tokenmill.evaluate.identity import model_hash, windows_hash
from tokenmill.evaluate.likelihood import Progress, no_progress
from tokenmill.evaluate.reference_cache import (
    CacheKey,
    CacheWriter,
    ReferenceCache,
    cache_path,
    is_cache,
    make_room,
    new_cache,
)
from tokenmill.evaluate.windows import Window
from tokenmill.log import get_logger

_log = get_logger(__name__)

_ROWS_AT_ONCE = {"cpu": 16, "cuda": 32}  # as float64: tens of MiB with the largest vocabularies
Device = torch.device | str
CPU = "cpu"

WindowSource = Callable[[Tokenizer], list[Window]]


@dataclass(frozen=True, slots=True)
class ReferenceRows:
    logprobs: Tensor  # [R, V] float64, on the device asked for
    targets: np.ndarray  # [R] float64: log-probabilities of the tokens that follow
    best: np.ndarray  # [R]: the most likely tokens


class Reference(Protocol):
    """Rows of the scored tokens of one window, `begin` and `end` counted from the first scored one."""

    name: str

    @property
    def cache(self) -> Path | None:
        """The file it comes from."""
        ...

    def rows(self, window: int, begin: int, end: int, device: Device = CPU) -> ReferenceRows: ...

    def close(self) -> None: ...


class CachedReference:
    def __init__(self, file: ReferenceCache, windows: Sequence[Window]) -> None:
        if windows_hash(windows) != file.key.windows_sha256:
            raise UserError(
                f"the logit cache of {file.key.model} is of another text, context, protocol or vocabulary",
                "give the same --text, --context and limits as when it was made, or the reference model",
            )
        self.name = file.key.model
        self._file = file
        # Row of the first scored token of each window.
        self._starts: list[int] = np.cumsum([0, *(window.num_scored for window in windows)]).tolist()

    @property
    def cache(self) -> Path | None:
        return self._file.path

    def rows(self, window: int, begin: int, end: int, device: Device = CPU) -> ReferenceRows:
        start = self._starts[window]
        return ReferenceRows(*self._file.read(start + begin, start + end, device))

    def close(self) -> None:
        """The file is unmapped with the last row that is in use."""


class LiveReference:
    """The reference model itself; it holds the rows of one window."""

    def __init__(self, name: str, llm: LLM, windows: Sequence[Window]) -> None:
        self.name = name
        self._windows = windows
        self._llm = llm
        self._window = -1
        self._logits = torch.empty(0)

    @property
    def cache(self) -> Path | None:
        return None

    def rows(self, window: int, begin: int, end: int, device: Device = CPU) -> ReferenceRows:
        if window != self._window:
            self._compute(window)
        scored = self._windows[window]
        logprobs = self._logits[begin:end].to(device).double().log_softmax(-1)
        targets = torch.tensor(scored.token_ids[scored.first + begin : scored.first + end], device=device)
        chosen = logprobs.gather(-1, targets[:, None])[:, 0]
        return ReferenceRows(logprobs, chosen.cpu().numpy(), logprobs.argmax(-1).cpu().numpy())

    def close(self) -> None:
        self._llm.close()

    def _compute(self, number: int) -> None:
        window = self._windows[number]
        vocabulary = self._llm.parts.description.vocab_size
        self._logits = torch.empty(window.num_scored, vocabulary)

        def visit(_passage: int, position: int, logits: Tensor) -> None:
            begin = position + 1 - window.first
            self._logits[begin : begin + len(logits)] = logits

        read_logits(self._llm.parts, [window.passage], visit)
        _require_finite(self._logits, self.name)
        self._window = number


def open_reference(
    reference: str,
    windows: Sequence[Window],
    windows_of: WindowSource,
    config: EngineConfig,
    cached: bool,
    on_progress: Progress,
    scratch: Path | None = None,
) -> Reference:
    """`reference` is a model or a logit cache, `windows` are the candidate's, which the reference must match.
    `config` is the engine's, its context that of the windows. With `scratch` the reference runs first and is closed
    before this returns; its rows are in that file."""
    if is_cache(Path(reference)):
        return CachedReference(ReferenceCache(Path(reference)), windows)
    path = resolve(reference).path
    if windows_hash(windows_of(load_tokenizer(path))) != windows_hash(windows):
        raise UserError(
            f"the candidate tokenizes the text differently from the reference {reference}: their vocabularies differ",
            "compare models of one vocabulary, such as a model and its own quantization",
        )
    if scratch is not None:
        rows, width = sum(window.num_scored for window in windows), open_checkpoint(path).description.vocab_size
        key = CacheKey(reference, "", windows_hash(windows), "", rows, width)
        with LLM(str(path), config) as llm:
            _write(CacheWriter(scratch, key), reference, llm, windows, on_progress)
        return CachedReference(ReferenceCache(scratch), windows)
    if cached:
        cache = _find_or_make(reference, path, windows, config, on_progress)
        if cache is not None:
            return CachedReference(cache, windows)
    return LiveReference(reference, LLM(str(path), config), windows)


def _find_or_make(
    name: str, path: Path, windows: Sequence[Window], config: EngineConfig, on_progress: Progress
) -> ReferenceCache | None:
    """The cache of this model and these windows; None if it would be too large."""
    key = reference_key(name, path, windows, config)
    cache = find_cache(key)
    if cache is not None or not has_room(key):
        return cache
    with LLM(str(path), config) as llm:
        return make_cache(key, llm, windows, on_progress)


def reference_key(name: str, path: Path, windows: Sequence[Window], config: EngineConfig) -> CacheKey:
    rows, width = sum(window.num_scored for window in windows), open_checkpoint(path).description.vocab_size
    return CacheKey(name, model_hash(path), windows_hash(windows), numerics(config), rows, width)


def numerics(config: EngineConfig) -> str:
    """What the values of a model depend on besides its weights, for the name of a file."""
    chosen = (config.device, config.kernels, config.executor, config.quantization, config.kv_cache_dtype)
    words = [__version__, *(str(value or "auto") for value in chosen)]
    if config.kv_native_layers is not None:
        words.append(str(config.kv_native_layers))
    if config.kv_budget_policy:
        words.append(f"{config.kv_budget_policy}{config.kv_budget}")
    return "-".join(words)


def find_cache(key: CacheKey) -> ReferenceCache | None:
    file = cache_path(key)
    if file.is_file():
        try:
            cache = ReferenceCache(file)
            os.utime(file)
            return cache
        except UserError as error:
            _log.warning("the reference is computed again: %s", error)
    return None


def has_room(key: CacheKey) -> bool:
    if make_room(key.nbytes):
        return True
    size = readable_bytes(key.nbytes)
    _log.warning("the reference's log-probabilities would take %s: both models run side by side instead", size)
    return False


def make_cache(
    key: CacheKey, llm: LLM, windows: Sequence[Window], on_progress: Progress = no_progress
) -> ReferenceCache:
    """Compute the rows by the engine of the reference. The caller has asked `has_room`."""
    file = cache_path(key)
    with new_cache(file, key) as writer:
        _write(writer, key.model, llm, windows, on_progress)
    return ReferenceCache(file)


def _write(writer: CacheWriter, name: str, llm: LLM, windows: Sequence[Window], on_progress: Progress) -> None:
    start = 0
    for number, window in enumerate(windows):

        def visit(_passage: int, position: int, logits: Tensor, window: Window = window, start: int = start) -> None:
            _require_finite(logits, name)
            step = _ROWS_AT_ONCE[logits.device.type]
            for offset in range(0, len(logits), step):
                piece = logits[offset : offset + step]
                begin = position + 1 + offset
                targets = torch.tensor(window.token_ids[begin : begin + len(piece)], device=logits.device)
                writer.write(start + begin - window.first, piece.double().log_softmax(-1), targets)

        read_logits(llm.parts, [window.passage], visit, on_device=True)
        start += window.num_scored
        on_progress(number + 1, len(windows))


def _require_finite(logits: Tensor, name: str) -> None:
    if not bool(logits.isfinite().all()):
        raise UserError(f"the reference {name} gives logits that are not finite", "compare with a sound model")
