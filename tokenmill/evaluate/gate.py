"""The gate: whether a candidate keeps the quality of its reference, measured on held-out text before it is saved.

The rule: refused if any scored token has logits that are not finite; refused unless the loss (ratio of perplexities
minus one) is shown to be within the limit, that is, if the upper end of its one-sided confidence interval, from the
paired standard error, exceeds the limit. The other limits, on divergence and agreement, are on plain measured values.
Called by `quantize` and `optimize`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.evaluate.divergence import DivergenceReport, measure_divergence
from tokenmill.evaluate.likelihood import Progress, no_progress
from tokenmill.evaluate.statistics import Estimate
from tokenmill.evaluate.windows import Window, added_bos, cut_chunks, half_scored

# Rounding moves a prediction both ways: perplexity shows the mean of that, divergence all of it. On text that the model
# might have written, the mean divergence of harmless rounding is about the logarithm of the ratio of perplexities
# (docs/lab/quantization.md: 0.7 to 1.0 of it); twice that means losses that gains elsewhere hide.
KLD_PER_LOSS = 2.0
MIN_TOKENS = 4  # of a token sequence: one to open it, one to open the half that is scored


@dataclass(frozen=True, slots=True)
class GateLimits:
    max_quality_loss: float = 0.01  # of perplexity: 0.01 is one percent more; inf: measured only
    confidence: float = 0.95  # that the loss is within the limit; 0.5: the measured value decides
    max_kld_mean: float = math.inf  # nats
    min_top1_agreement: float = 0.0

    def __post_init__(self) -> None:
        if not self.max_quality_loss >= 0:
            raise UserError(f"the largest quality loss is {self.max_quality_loss:g}", "give 0 or more, such as 0.01")
        if not 0.5 <= self.confidence < 1:
            raise UserError(f"the confidence is {self.confidence:g}", "give 0.5 to less than 1, such as 0.95")
        if not self.max_kld_mean >= 0:
            raise UserError(f"the largest divergence is {self.max_kld_mean:g}", "give 0 or more, such as 0.02")


def default_max_kld(max_quality_loss: float) -> float:
    """The limit of the mean divergence, in nats, where only one of perplexity is given: 0.02 for 1 %, 0.1 for 5 %."""
    return KLD_PER_LOSS * math.log1p(max_quality_loss)


@dataclass(frozen=True, slots=True)
class GateReport:
    passed: bool
    reasons: tuple[str, ...]  # of refusal
    perplexity: float
    reference_perplexity: float
    perplexity_ratio: float
    perplexity_ratio_low: float  # two-sided 95 % interval
    perplexity_ratio_high: float
    perplexity_ratio_stderr: float
    quality_loss: float  # perplexity_ratio - 1
    kld_mean: float
    kld_p99: float
    top1_agreement: float
    tokens: int
    nan_count: int


def run_gate(
    candidate: str | Path,
    reference: str | Path,
    text: str | Sequence[Sequence[int]],
    limits: GateLimits | None = None,
    config: EngineConfig | None = None,
    *,
    context: int = 512,
    cached: bool = True,
    scratch: Path | None = None,
    on_progress: Progress = no_progress,
) -> GateReport:
    """`text` is the text itself, cut into chunks of `context` tokens, or token sequences of at most that length; the
    second half of each is scored. `reference` may be a logit cache; with `cached` one is made and kept; with `scratch`
    it is made in that file and the two models run one after the other."""

    def windows_of(tokenizer: Tokenizer) -> list[Window]:
        if isinstance(text, str):
            return cut_chunks(tokenizer.encode(text), context, added_bos(tokenizer))
        return [half_scored(_checked(sequence, context)) for sequence in text]

    if not text:
        raise UserError("there is no text to measure quality on", f"give at least {context} tokens")
    report = measure_divergence(
        str(candidate),
        str(reference),
        windows_of,
        config or EngineConfig(),
        context=context,
        cached=cached,
        scratch=scratch,
        on_progress=on_progress,
    )
    return judge(report, limits or GateLimits())


def judge(report: DivergenceReport, limits: GateLimits) -> GateReport:
    ratio = Estimate(report.perplexity_ratio, report.perplexity_ratio_stderr)
    low, high = ratio.interval()
    reasons = tuple(_reasons(report, ratio, limits))
    return GateReport(
        not reasons,
        reasons,
        report.perplexity,
        report.reference_perplexity,
        ratio.value,
        low,
        high,
        ratio.stderr,
        ratio.value - 1,
        report.kld_mean,
        report.kld_p99,
        report.top1_agreement,
        report.tokens,
        report.nan_count,
    )


def _reasons(report: DivergenceReport, ratio: Estimate, limits: GateLimits) -> list[str]:
    reasons = []
    if report.nan_count:
        reasons.append(f"{report.nan_count} of {report.tokens} tokens have logits that are NaN or infinite")
    if report.nan_count == report.tokens:
        return reasons
    loss, limit = ratio.value - 1, limits.max_quality_loss
    upper = ratio.upper(limits.confidence) - 1
    if not math.isfinite(ratio.value):
        reasons.append("the perplexity is not finite")
    elif loss > limit:
        reasons.append(f"perplexity grows by {loss:.2%} (+-{ratio.stderr:.2%}), more than {limit:.2%}")
    elif upper > limit:
        # The standard error falls with the square root of the tokens: this many would bring the bound to the limit.
        needed = f"about {_tokens_needed(report, loss, upper, limit)} tokens" if loss < limit else "a higher limit"
        reasons.append(
            f"perplexity grows by {loss:.2%}, but it may be {upper:.2%} ({limits.confidence:.0%} confidence), "
            f"more than {limit:.2%}: {report.tokens} scored tokens cannot tell, {needed} would"
        )
    if report.kld_mean > limits.max_kld_mean:
        reasons.append(f"mean divergence {report.kld_mean:.4g} is more than {limits.max_kld_mean:.4g} nats")
    if report.top1_agreement < limits.min_top1_agreement:
        reasons.append(f"top-1 agreement {report.top1_agreement:.4f} is less than {limits.min_top1_agreement:g}")
    return reasons


def _tokens_needed(report: DivergenceReport, loss: float, upper: float, limit: float) -> int:
    factor = ((upper - loss) / (limit - loss)) ** 2
    return min(10**9, math.ceil(report.tokens * factor))


def _checked(sequence: Sequence[int], context: int) -> list[int]:
    if not MIN_TOKENS <= len(sequence) <= context:
        raise UserError(
            f"a sequence to measure quality on has {len(sequence)} tokens",
            f"give {MIN_TOKENS} to {context} tokens each",
        )
    return list(sequence)
