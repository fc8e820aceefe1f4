"""Measuring contenders: loaded engines alternate on the same requests; quality is measured on a held-out text.

Speed comes from bench/, quality from evaluate/; this module loads engines, alternates runs and clears
caches between them. Called by the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from types import TracebackType

from tokenmill.bench.prompts import SyntheticRequest
from tokenmill.bench.throughput import run_requests, warm_up
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.checkpoint.tokenizer_files import load_tokenizer
from tokenmill.config import EngineConfig
from tokenmill.engine.llm import LLM
from tokenmill.errors import UserError
from tokenmill.evaluate.divergence import DivergenceReport, measure_divergence
from tokenmill.evaluate.gate import GateLimits, judge
from tokenmill.evaluate.likelihood import no_progress
from tokenmill.evaluate.perplexity import scoring_config
from tokenmill.evaluate.reference import open_reference
from tokenmill.evaluate.windows import Window, added_bos, cut_chunks
from tokenmill.hardware.machine import available_memory
from tokenmill.optimize.artefacts import weight_bytes
from tokenmill.optimize.results import Quality, Run

_UNSCORED_SHARE = 8  # the first eighth of a window is context only
_LOAD_FACTOR = 1.3  # memory of a loaded model over its file: repacked weights and buffers


class Contender:
    """A loaded engine, warm."""

    def __init__(self, path: Path, config: EngineConfig) -> None:
        needed, free = int(weight_bytes(path) * _LOAD_FACTOR), available_memory()
        if needed > free:
            raise UserError(
                f"out of memory: it needs about {needed >> 20:,} MiB, {free >> 20:,} MiB are free", "free some memory"
            )
        self._llm = LLM(str(path), config)
        self._llm.tokens_at_once = 1  # one step at a time, as the server runs it
        self._warm = False
        self._memory_bytes = weight_bytes(path) + self._llm.parts.runtime.store.nbytes

    def run(self, requests: list[SyntheticRequest]) -> Run:
        if not self._warm:
            warm_up(self._llm, requests[0])
            self._warm = True
        self._llm.parts.kv.clear()  # an earlier run's prefixes must not speed this one up
        report, outputs = run_requests(self._llm, requests)
        first = [output.metrics.ttft for output in outputs]
        later = [output.metrics.tpot(len(output.outputs[0].token_ids)) for output in outputs]
        return Run(
            report.elapsed_s,
            report.output_tok_s,
            report.total_tok_s,
            1e3 * median(value for value in first if value is not None),
            1e3 * median([value for value in later if value is not None] or [0.0]),
            self._memory_bytes,
        )

    def close(self) -> None:
        self._llm.close()

    def __enter__(self) -> Contender:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()


def take_turns(contenders: Sequence[Contender], requests: list[SyntheticRequest]) -> list[Run]:
    """One cycle: each contender runs the same requests, one after the other."""
    return [contender.run(requests) for contender in contenders]


class QualityText:
    """A held-out text cut into windows, and the baseline's log-probabilities on it."""

    def __init__(self, text: str, context: int, max_windows: int) -> None:
        self.text = text
        self.context = context
        self.max_windows = max_windows

    def windows(self, tokenizer: Tokenizer) -> list[Window]:
        chunks = cut_chunks(tokenizer.encode(self.text), self.context, added_bos(tokenizer), self.max_windows)
        return [Window(chunk.token_ids, max(1, self.context // _UNSCORED_SHARE)) for chunk in chunks]

    def reference(self, path: Path, config: EngineConfig) -> str:
        """Path of the baseline's logit cache on this text (made on first use), or of the model if it is too large."""
        windows = self.windows(load_tokenizer(path))
        config = scoring_config(config, self.context)
        base = open_reference(str(path), windows, self.windows, config, True, no_progress)
        try:
            return str(base.cache or path)
        finally:
            base.close()

    def compare(self, path: Path, reference: str, config: EngineConfig) -> DivergenceReport:
        return measure_divergence(str(path), reference, self.windows, config, context=self.context)


def as_quality(report: DivergenceReport) -> Quality:
    verdict = judge(report, GateLimits(max_quality_loss=float("inf")))
    return Quality(
        loss=verdict.quality_loss,
        loss_low=verdict.perplexity_ratio_low - 1,
        loss_high=verdict.perplexity_ratio_high - 1,
        kld_mean=verdict.kld_mean,
        kld_p99=verdict.kld_p99,
        top1_agreement=verdict.top1_agreement,
        perplexity=verdict.perplexity,
        reference_perplexity=verdict.reference_perplexity,
        tokens=verdict.tokens,
        nan_count=verdict.nan_count,
        stderr=verdict.perplexity_ratio_stderr,
    )


def refusal(report: DivergenceReport, limit: float) -> str:
    """Why the gate refuses the candidate; empty if it passes."""
    return "; ".join(judge(report, GateLimits(max_quality_loss=limit)).reasons)
