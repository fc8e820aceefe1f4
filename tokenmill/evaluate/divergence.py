"""How far a candidate's predictions are from a reference's, token by token: what a quantization changed.

The Kullback-Leibler divergence KL(reference || candidate) of each scored token over the whole vocabulary in float64,
agreement of the most likely token, and the paired ratio of perplexities, as llama-perplexity --kl-divergence. Logits
are streamed: memory does not grow with the text. Called by `tokenmill eval divergence` and the gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tokenmill.checkpoint.sources import resolve
from tokenmill.checkpoint.tokenizer_files import load_tokenizer
from tokenmill.config import EngineConfig
from tokenmill.engine.llm import LLM
from tokenmill.engine.scoring import read_logits
from tokenmill.evaluate.likelihood import Progress, no_progress
from tokenmill.evaluate.perplexity import scoring_config
from tokenmill.evaluate.reference import Reference, WindowSource, open_reference
from tokenmill.evaluate.statistics import Estimate, exponential_of_mean, mean
from tokenmill.evaluate.windows import Window

_VALUES_AT_ONCE = {"cpu": 1 << 21, "cuda": 1 << 22}  # float64 values of a comparison: 16 or 32 MiB a piece


@dataclass(slots=True)
class TokenComparison:
    """Per scored token. Where the candidate's logits are not finite, its values are NaN."""

    divergence: np.ndarray  # nats
    logprob: np.ndarray  # of the token that follows, by the candidate
    reference_logprob: np.ndarray
    same_top: np.ndarray  # 1.0 where both have the same most likely token

    @property
    def finite(self) -> TokenComparison:
        keep = np.isfinite(self.divergence)
        return TokenComparison(
            self.divergence[keep], self.logprob[keep], self.reference_logprob[keep], self.same_top[keep]
        )


@dataclass(frozen=True, slots=True)
class DivergenceReport:
    kld_mean: float
    kld_stderr: float
    kld_median: float
    kld_p90: float
    kld_p95: float
    kld_p99: float
    kld_p99_9: float
    kld_max: float
    top1_agreement: float
    top1_stderr: float
    perplexity: float
    reference_perplexity: float
    perplexity_ratio: float
    perplexity_ratio_stderr: float  # paired: both models see the same tokens
    probability_change_mean: float  # of the token that follows
    probability_change_rms: float
    tokens: int  # scored
    nan_count: int  # scored tokens without finite logits; they are in no other figure
    chunks: int
    reference: str
    reference_cache: str | None


def measure_divergence(
    model: str,
    reference: str,
    windows_of: WindowSource,
    config: EngineConfig,
    *,
    context: int,
    cached: bool = True,
    scratch: Path | None = None,
    on_progress: Progress = no_progress,
) -> DivergenceReport:
    """`windows_of` cuts the text with a model's tokenizer. `on_progress` counts the windows of each model.
    `scratch`: a file to be written, so that the two models are never in memory together."""
    config = scoring_config(config, context)
    path = resolve(model).path
    windows = windows_of(load_tokenizer(path))
    plain = replace(config, lora=())  # an adapter is the candidate's
    base = open_reference(reference, windows, windows_of, plain, cached, on_progress, scratch)
    try:
        with LLM(str(path), config) as llm:
            llm.use_only_lora()
            comparison = compare_tokens(llm, base, windows, on_progress)
        return summarize(comparison, base, len(windows))
    finally:
        base.close()


def compare_tokens(
    llm: LLM, base: Reference, windows: Sequence[Window], on_progress: Progress = no_progress
) -> TokenComparison:
    """One window at a time, as the reference was computed: with integer kernels the batch shows in the last digits."""
    parts = []
    for number, window in enumerate(windows):
        part = TokenComparison(*(np.full(window.num_scored, np.nan) for _ in range(4)))

        def visit(
            _passage: int,
            position: int,
            logits: Tensor,
            number: int = number,
            window: Window = window,
            part: TokenComparison = part,
        ) -> None:
            step = max(1, _VALUES_AT_ONCE[logits.device.type] // logits.shape[1])
            for offset in range(0, len(logits), step):
                piece = logits[offset : offset + step]
                begin = position + offset + 1 - window.first
                targets = torch.tensor(window.token_ids[window.first + begin : window.first + begin + len(piece)])
                _compare_rows(part, base, number, begin, piece, targets)

        read_logits(llm.parts, [window.passage], visit, on_device=True)
        parts.append(part)
        on_progress(number + 1, len(windows))
    names = ("divergence", "logprob", "reference_logprob", "same_top")
    return TokenComparison(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _compare_rows(
    part: TokenComparison, base: Reference, window: int, begin: int, logits: Tensor, targets: Tensor
) -> None:
    """On the device of the logits: the vocabulary in float64 is more work than a small model's step."""
    rows = base.rows(window, begin, begin + len(logits), logits.device)
    expected, target = rows.logprobs, rows.targets
    width = min(expected.shape[1], logits.shape[1])
    if expected.shape[1] > width:  # padding ids at the end of one vocabulary are not compared
        kept = expected[:, :width].logsumexp(-1, keepdim=True)
        expected, target = expected[:, :width] - kept, target - kept[:, 0].cpu().numpy()
    span = slice(begin, begin + len(logits))
    finite = logits.isfinite().all(-1).cpu().numpy()
    actual = logits[:, :width].double().log_softmax(-1)
    divergence = (expected.exp() * (expected - actual)).sum(-1).cpu().numpy()
    part.divergence[span] = np.where(finite, divergence, np.nan)
    part.logprob[span] = actual.gather(-1, targets.to(logits.device)[:, None])[:, 0].cpu().numpy()
    part.reference_logprob[span] = target
    part.same_top[span] = actual.argmax(-1).cpu().numpy() == rows.best


def summarize(comparison: TokenComparison, base: Reference, num_windows: int) -> DivergenceReport:
    finite = comparison.finite
    values = finite.divergence
    median, p90, p95, p99, p99_9, largest = _quantiles(values, (0.5, 0.9, 0.95, 0.99, 0.999, 1.0))
    divergence, agreement, ratio = mean(values), mean(finite.same_top), perplexity_ratio(finite)
    change = np.exp(finite.logprob) - np.exp(finite.reference_logprob)
    return DivergenceReport(
        kld_mean=divergence.value,
        kld_stderr=divergence.stderr,
        kld_median=median,
        kld_p90=p90,
        kld_p95=p95,
        kld_p99=p99,
        kld_p99_9=p99_9,
        kld_max=largest,
        top1_agreement=agreement.value,
        top1_stderr=agreement.stderr,
        perplexity=exponential_of_mean(-finite.logprob).value,
        reference_perplexity=exponential_of_mean(-finite.reference_logprob).value,
        perplexity_ratio=ratio.value,
        perplexity_ratio_stderr=ratio.stderr,
        probability_change_mean=mean(change).value,
        probability_change_rms=float(np.sqrt(mean(change**2).value)),
        tokens=len(comparison.divergence),
        nan_count=len(comparison.divergence) - len(values),
        chunks=num_windows,
        reference=base.name,
        reference_cache=None if base.cache is None else str(base.cache),
    )


def _quantiles(values: np.ndarray, shares: Sequence[float]) -> list[float]:
    return [float(value) for value in np.quantile(values, shares)] if values.size else [float("nan")] * len(shares)


def perplexity_ratio(comparison: TokenComparison) -> Estimate:
    """Candidate's over reference's perplexity, with the standard error of the paired differences of losses."""
    return exponential_of_mean(comparison.reference_logprob - comparison.logprob)
