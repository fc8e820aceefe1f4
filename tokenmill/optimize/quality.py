"""What a candidate's quality is judged by, and the judge: divergence and perplexity on a held-out text.

Loads engines of its own: called in a contender's process, never beside a measurement of speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.checkpoint.tokenizer_files import load_tokenizer
from tokenmill.config import EngineConfig
from tokenmill.evaluate.divergence import DivergenceReport, measure_divergence
from tokenmill.evaluate.gate import GateLimits, judge
from tokenmill.evaluate.likelihood import no_progress
from tokenmill.evaluate.perplexity import scoring_config
from tokenmill.evaluate.reference import open_reference
from tokenmill.evaluate.windows import Window, added_bos, cut_chunks
from tokenmill.optimize.results import Proof, Quality

_UNSCORED_SHARE = 8  # the first eighth of a window is context only
_SHORT_KLD_FACTOR = 3  # a mean divergence this many times the allowed loss rules a candidate out (short_text_refusal)


@dataclass(frozen=True, slots=True)
class QualityPlan:
    """Texts in windows of `context` tokens; `limit`: of quality loss."""

    text: str
    context: int
    short_windows: int
    windows: int
    limit: float
    max_kld: float | None
    tasks: tuple[Path, ...] = ()
    max_task_loss: float = 0.02
    long_contexts: tuple[int, ...] = ()
    generation: bool = True


class QualityJudge:
    """Compares candidates with the reference, each with its own KV dtype."""

    def __init__(self, plan: QualityPlan, reference_path: Path, reference_config: EngineConfig) -> None:
        self.plan = plan
        self._path = reference_path
        self._config = _scoring(reference_config)
        self._references: dict[int, str] = {}

    def check(self, path: Path, config: EngineConfig) -> Quality:
        """On the short text."""
        return as_quality(self._compare(path, config, self.plan.short_windows))

    def prove(self, path: Path, config: EngineConfig) -> Proof:
        report = self._compare(path, config, self.plan.windows)
        limits = GateLimits(max_quality_loss=self.plan.limit, max_kld_mean=self.plan.max_kld or float("inf"))
        return Proof(as_quality(report), refusals=judge(report, limits).reasons)

    def _compare(self, path: Path, config: EngineConfig, max_windows: int) -> DivergenceReport:
        context = self.plan.context

        def windows_of(tokenizer: Tokenizer) -> list[Window]:
            chunks = cut_chunks(tokenizer.encode(self.plan.text), context, added_bos(tokenizer), max_windows)
            return [Window(chunk.token_ids, max(1, context // _UNSCORED_SHARE)) for chunk in chunks]

        if max_windows not in self._references:
            windows = windows_of(load_tokenizer(self._path))
            scoring = scoring_config(self._config, context)
            base = open_reference(str(self._path), windows, windows_of, scoring, True, no_progress)
            try:
                self._references[max_windows] = str(base.cache or self._path)
            finally:
                base.close()
        return measure_divergence(
            str(path), self._references[max_windows], windows_of, _scoring(config), context=context
        )


def _scoring(config: EngineConfig) -> EngineConfig:
    return replace(config, prefix_caching=False, speculate="off", concurrency=None)


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


def short_text_refusal(quality: Quality, limit: float) -> str:
    """Why the short text already rules the candidate out; empty if it does not.

    On text that the model itself might have written, the mean divergence is the logarithm of the perplexity ratio, with
    far less noise than the ratio itself.
    """
    if quality.nan_count:
        return f"{quality.nan_count} of {quality.tokens} tokens have logits that are NaN or infinite"
    if quality.loss_low > limit:
        return f"perplexity grows by {quality.loss:.2%} (at least {quality.loss_low:.2%}) on the short text"
    if quality.kld_mean > _SHORT_KLD_FACTOR * limit:
        return f"mean divergence {quality.kld_mean:.4f} on the short text, more than {_SHORT_KLD_FACTOR} x {limit:g}"
    return ""
