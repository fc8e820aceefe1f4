"""Quality of an engine behind HTTP, against the reference that our own candidates are proven against.

By the log-probabilities that its API gives (evaluate/endpoint_probe.py), else by its greedy answers. The result is a
`Quality` like any candidate's, on the positions that were asked for, so with a wider interval. Called by measure.py
and today.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tokenmill.config import EngineConfig
from tokenmill.evaluate.endpoint import EndpointClient
from tokenmill.evaluate.endpoint_probe import ANSWERS, PROMPT, Probe, ProbePlan
from tokenmill.evaluate.endpoint_report import endpoint_divergence, probe_endpoint, top1_agreement
from tokenmill.evaluate.endpoint_scores import PositionScorer, Scores
from tokenmill.evaluate.rounding_match import is_renormalized
from tokenmill.evaluate.statistics import Estimate, exponential_of_mean, mean
from tokenmill.optimize.results import Check, Quality

_MIN_AGREEMENT = 0.9  # of greedy answers, where nothing better can be had


@dataclass(frozen=True, slots=True)
class EndpointVerdict:
    """`refusal`: why the quality is not accepted, empty if it is. `method`: how it was measured."""

    quality: Quality | None
    checks: tuple[Check, ...]
    method: str
    refusal: str


@dataclass(frozen=True, slots=True)
class EndpointJudge:
    reference: Path
    text: str
    limit: float = 0.01  # of the rise of perplexity
    max_kld: float | None = None
    config: EngineConfig = field(default_factory=EngineConfig)
    plan: ProbePlan = field(default_factory=lambda: ProbePlan(samples=1, temperature=0.0))

    def judge(self, url: str, model: str = "", api_key: str = "") -> EndpointVerdict:
        with EndpointClient(url, model, api_key) as client:
            probe = probe_endpoint(client, self.reference, self.text, self.plan)
        scorer = PositionScorer(probe, self.reference, self.config)
        if probe.method == ANSWERS:
            return _by_answers(probe, scorer)
        quality = _quality(probe, scorer)
        return EndpointVerdict(quality, (), probe.method, self._refusal(quality))

    def _refusal(self, quality: Quality) -> str:
        """Refused where the harm is shown: a probe of some hundred tokens cannot show that there is none."""
        if quality.loss_low > self.limit:
            return (
                f"perplexity grows by {quality.loss:.2%} (at least {quality.loss_low:.2%}), more than {self.limit:.2%}"
            )
        if self.max_kld is not None and quality.kld_mean > self.max_kld:
            return f"mean divergence {quality.kld_mean:.4g} is more than {self.max_kld:g}"
        return ""


def _quality(probe: Probe, scorer: PositionScorer) -> Quality:
    observed, base = probe.observed, scorer.reference
    divergence = endpoint_divergence(observed, base.visible, is_renormalized(observed, base.visible))
    ratio, perplexity, expected = _perplexities(probe, base, mean(divergence))
    low, high = ratio.interval()
    return Quality(
        loss=ratio.value - 1,
        loss_low=low - 1,
        loss_high=high - 1,
        kld_mean=float(divergence.mean()),
        kld_p99=float(np.quantile(divergence, 0.99)),
        top1_agreement=top1_agreement(probe, scorer.best),
        perplexity=perplexity,
        reference_perplexity=expected,
        tokens=len(probe.rows),
        nan_count=0,
        stderr=ratio.stderr,
    )


def _perplexities(probe: Probe, base: Scores, divergence: Estimate) -> tuple[Estimate, float, float]:
    """(ratio, perplexity, the reference's). Of generated tokens the endpoint is the author: there the divergence is
    the logarithm of the ratio, while the tokens themselves would flatter it."""
    own = np.array([_target(probe, row) for row in range(len(probe.rows))])
    expected = float(np.exp(-np.nanmean(base.target_logprobs)))
    if probe.method == PROMPT:
        ratio = exponential_of_mean((base.target_logprobs - own)[np.isfinite(own)])
    else:
        value = math.exp(divergence.value)
        ratio = Estimate(value, value * divergence.stderr)
    return ratio, expected * ratio.value, expected


def _target(probe: Probe, row: int) -> float:
    found = np.flatnonzero(probe.ids[row] == probe.targets[row])
    return float(probe.values[row][found[0]]) if len(found) else math.nan


def _by_answers(probe: Probe, scorer: PositionScorer) -> EndpointVerdict:
    agreement = float((np.array(probe.targets) == scorer.best).mean())
    refusal = (
        f"only {agreement:.1%} of its greedy tokens are the reference's, {_MIN_AGREEMENT:.0%} are wanted"
        if agreement < _MIN_AGREEMENT
        else ""
    )
    check = Check("greedy tokens that are the reference's", agreement, 1.0, _MIN_AGREEMENT, refusal)
    return EndpointVerdict(None, (check,), ANSWERS, refusal)
