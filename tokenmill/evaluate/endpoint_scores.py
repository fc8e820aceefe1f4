"""Our engine's log-probabilities at the positions of a probe: of the reference, and of each rounding of it.

One passage at a time, so that figures repeat. The reference's whole distributions are kept, and the divergence of every
candidate from them is computed over the whole vocabulary. Called by endpoint_report.py and the rivals of `optimize`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tokenmill.config import EngineConfig
from tokenmill.engine.llm import LLM
from tokenmill.engine.scoring import Passage, read_logits
from tokenmill.evaluate.endpoint_probe import Probe
from tokenmill.evaluate.perplexity import scoring_config
from tokenmill.evaluate.rounding_match import Visible

MAX_ROW_BYTES = 1 << 30  # of the reference's distributions, float32


@dataclass(frozen=True, slots=True)
class Scores:
    """`divergence`: KL(reference || this) of each row, over the whole vocabulary."""

    visible: Visible
    divergence: np.ndarray
    target_logprobs: np.ndarray  # NaN where the token that follows is not known


class PositionScorer:
    """Scores files at the rows of one probe. The reference is computed at once."""

    def __init__(self, probe: Probe, reference: Path, config: EngineConfig) -> None:
        self._probe = probe
        self._config = scoring_config(config, max(16, *(len(each) for each in probe.passages)))
        self._starts = probe.observed.starts
        rows: dict[int, Tensor] = {}
        self.reference = self._collect(self._rows(reference, self._config), rows)
        self.best = np.array([int(rows[number].argmax()) for number in range(len(probe.rows))])
        self._reference_rows = rows

    def score(self, path: Path, kv_cache_dtype: str = "") -> Scores:
        config = replace(self._config, kv_cache_dtype=kv_cache_dtype) if kv_cache_dtype else self._config
        return self._collect(self._rows(path, config))

    def _collect(self, rows: Iterator[tuple[int, Tensor]], kept: dict[int, Tensor] | None = None) -> Scores:
        values = np.full(int(self._starts[-1]), np.nan)
        divergence = np.zeros(len(self._probe.rows))
        targets = np.full(len(self._probe.rows), np.nan)
        for number, logprobs in rows:
            ids = torch.from_numpy(self._probe.ids[number])
            values[self._starts[number] : self._starts[number + 1]] = logprobs[ids].numpy()
            if self._probe.targets[number] >= 0:
                targets[number] = float(logprobs[self._probe.targets[number]])
            if kept is not None:
                kept[number] = logprobs
            else:
                base = self._reference_rows[number]
                divergence[number] = max(0.0, float(torch.dot(base.exp(), base - logprobs)))
        return Scores(Visible(self._starts, values), divergence, targets)

    def _rows(self, path: Path, config: EngineConfig) -> Iterator[tuple[int, Tensor]]:
        """(row, its log-probabilities [V] float32)."""
        by_passage: dict[int, list[int]] = {}
        for number, (passage, _index) in enumerate(self._probe.rows):
            by_passage.setdefault(passage, []).append(number)
        with _loaded(path, config) as llm:
            for passage, numbers in by_passage.items():
                tokens = self._probe.passages[passage]
                wanted = {self._probe.rows[number][1] - 1: number for number in numbers}
                found: dict[int, Tensor] = {}

                def visit(
                    _passage: int,
                    position: int,
                    logits: Tensor,
                    wanted: dict[int, int] = wanted,
                    found: dict[int, Tensor] = found,
                ) -> None:
                    for offset, row in enumerate(logits):
                        if position + offset in wanted:
                            found[wanted[position + offset]] = row.float().log_softmax(-1)

                read_logits(llm.parts, [Passage(tokens[: max(wanted) + 1], min(wanted))], visit)
                yield from sorted(found.items())


@contextmanager
def _loaded(path: Path, config: EngineConfig) -> Iterator[LLM]:
    with LLM(str(path), config) as llm:
        yield llm
