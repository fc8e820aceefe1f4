"""`tokenmill eval endpoint`: how far an endpoint is from a reference, and which rounding of it that looks like.

Asks the endpoint (endpoint_probe.py), scores the reference and its roundings at the same positions
(endpoint_scores.py) and matches them (rounding_match.py). The files of the roundings come from the caller. Called by
the command line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.tokenizer_files import load_chat_template, load_tokenizer
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.evaluate.endpoint import EndpointClient
from tokenmill.evaluate.endpoint_probe import ANSWERS, Probe, ProbePlan, Prober, Progress, cut_passages
from tokenmill.evaluate.endpoint_scores import MAX_ROW_BYTES, PositionScorer, Scores
from tokenmill.evaluate.likelihood import no_progress
from tokenmill.evaluate.rounding_match import (
    OTHER,
    Visible,
    is_renormalized,
    match_roundings,
    visible_divergence,
)
from tokenmill.evaluate.statistics import Estimate, mean

STEP = ("Q8_0", "F16")  # one step of 8-bit rounding apart: always among the candidates
WEIGHTS = ("F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "Q3_K_M")
KV_DTYPES = ("fp8", "int8", "int4")
UNQUANTIZED_KV = "unquantized"
_KV_FINALISTS = 2  # weight roundings that KV dtypes are tried with
_KV_PROBABILITY = 0.05  # that a rounding must have for it
_MAX_COARSENING = 3.0  # invisible tokens never hide more than this factor of a divergence

FileOf = Callable[[str], Path]  # name of a rounding -> the reference's file in it, made if need be
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RoundingScore:
    weights: str
    kv: str
    probability: float
    distance: float  # root mean square difference of log-probabilities from the endpoint
    kld_mean: float  # of this rounding from the reference


@dataclass(frozen=True, slots=True)
class EndpointReport:
    kld_mean: float  # KL(reference || endpoint), nats
    kld_stderr: float
    kld_low: float  # 95 % interval
    kld_high: float
    most_like: str  # a rounding of the weights, or "another rounding"
    confidence: float
    most_like_kv: str
    kv_confidence: float
    candidates: tuple[RoundingScore, ...]  # the most likely first
    top1_agreement: float
    method: str  # "prompt" | "generated" | "answers"
    positions: int
    visible_tokens: float  # mean per position
    rerun_noise: float
    renormalized: bool  # the endpoint shows probabilities among the visible tokens only
    url: str
    model: str
    reference: str


@dataclass(frozen=True, slots=True)
class EndpointJob:
    reference: Path
    text: str
    plan: ProbePlan
    weights: tuple[str, ...] = WEIGHTS
    kv_dtypes: tuple[str, ...] = KV_DTYPES
    method: str = ""  # empty: the best that the endpoint offers


def measure_endpoint(
    client: EndpointClient,
    job: EndpointJob,
    config: EngineConfig,
    file_of: FileOf,
    say: Say = lambda _line: None,
    on_progress: Progress = no_progress,
) -> EndpointReport:
    probe = probe_endpoint(client, job.reference, job.text, job.plan, job.method, on_progress)
    say(f"{len(probe.rows)} positions by the method '{probe.method}'; scoring the reference and its roundings")
    scorer = PositionScorer(probe, job.reference, config)
    found = _score_weights(scorer, job.weights, file_of, say)
    if probe.method == ANSWERS:
        rows, kld = _judge_answers(found)
        return _report(client, job, probe, rows, kld, math.nan, renormalized=False)
    observed, base = probe.observed, scorer.reference.visible
    renormalized = is_renormalized(observed, base)
    for weights in _kv_finalists(_match(observed, base, found, renormalized)):
        for kv in job.kv_dtypes:
            say(f"scoring {weights} with {kv} KV")
            found[weights, kv] = scorer.score(file_of(weights), kv)
    rows = _match(observed, base, found, renormalized)
    divergence = endpoint_divergence(observed, base, renormalized)
    like = found.get((rows[0].weights, rows[0].kv))
    kld = mean(divergence * _hidden_share(like, base, renormalized))
    return _report(client, job, probe, rows, kld, top1_agreement(probe, scorer.best), renormalized)


def probe_endpoint(
    client: EndpointClient,
    reference: Path,
    text: str,
    plan: ProbePlan,
    method: str = "",
    on_progress: Progress = no_progress,
) -> Probe:
    description, tokenizer = open_checkpoint(reference).description, load_tokenizer(reference)
    length = min(plan.length, description.context_length // 2 - plan.answer_tokens)
    plan = replace(plan, length=length)
    prober = Prober(client, tokenizer, load_chat_template(reference), plan)
    probe = prober.run(cut_passages(text, tokenizer, plan), method, on_progress)
    probe.keep(min(plan.positions, max(64, MAX_ROW_BYTES // (4 * description.vocab_size))))
    return probe


def endpoint_divergence(observed: Visible, reference: Visible, renormalized: bool) -> np.ndarray:
    """Per position, over the visible tokens and all others as one."""
    if renormalized:
        observed, reference = observed.conditional(), reference.conditional()
    return visible_divergence(reference, observed)


def top1_agreement(probe: Probe, best: np.ndarray) -> float:
    """Share of positions whose most likely visible token is the reference's most likely one."""
    tops = np.array([ids[values.argmax()] for ids, values in zip(probe.ids, probe.values, strict=True)])
    return float((tops == best).mean())


def _score_weights(
    scorer: PositionScorer, names: Sequence[str], file_of: FileOf, say: Say
) -> dict[tuple[str, str], Scores]:
    found: dict[tuple[str, str], Scores] = {}
    for name in dict.fromkeys([*names, *STEP]):
        say(f"scoring {name}")
        try:
            found[name, UNQUANTIZED_KV] = scorer.score(file_of(name))
        except UserError as error:
            if name in STEP:
                raise
            say(f"{name} is left out: {error}")
    return found


def _match(
    observed: Visible, reference: Visible, found: Mapping[tuple[str, str], Scores], renormalized: bool
) -> list[RoundingScore]:
    """The most likely first; the last resort, OTHER, among them."""
    keys = {_name(key): key for key in found}
    visible = {_name(key): scores.visible for key, scores in found.items()}
    if renormalized:
        observed, reference = observed.conditional(), reference.conditional()
        visible = {name: each.conditional() for name, each in visible.items()}
    step = (_name((STEP[0], UNQUANTIZED_KV)), _name((STEP[1], UNQUANTIZED_KV)))
    rows = []
    for match in match_roundings(observed, reference, visible, step):
        weights, kv = keys.get(match.name, (OTHER, ""))
        kld = float(found[weights, kv].divergence.mean()) if match.name in keys else math.nan
        rows.append(RoundingScore(weights, kv, match.probability, match.distance, kld))
    return rows


def _name(key: tuple[str, str]) -> str:
    return key[0] if key[1] == UNQUANTIZED_KV else f"{key[0]}, {key[1]} KV"


def _kv_finalists(rows: Sequence[RoundingScore]) -> list[str]:
    likely = [row.weights for row in rows if row.weights != OTHER and row.probability > _KV_PROBABILITY]
    nearest = min((row for row in rows if row.weights != OTHER), key=lambda row: row.distance)
    return list(dict.fromkeys([*likely, nearest.weights]))[:_KV_FINALISTS]


def _hidden_share(like: Scores | None, reference: Visible, renormalized: bool) -> float:
    """What a divergence over the whole vocabulary is, as a multiple of that over the visible tokens: taken from the
    rounding that the endpoint is most like, of which both are known."""
    if like is None:
        return 1.0
    seen = float(endpoint_divergence(like.visible, reference, renormalized).mean())
    whole = float(like.divergence.mean())
    return min(max(whole / seen, 1.0), _MAX_COARSENING) if seen > 1e-7 else 1.0


def _judge_answers(found: Mapping[tuple[str, str], Scores]) -> tuple[list[RoundingScore], Estimate]:
    """By the likelihood of the sampled tokens under each rounding. The divergence is that of the roundings, weighted
    by how likely each is: all that sampled text can say."""
    totals = {key: float(np.nansum(scores.target_logprobs)) for key, scores in found.items()}
    weights = {key: math.exp(total - max(totals.values())) for key, total in totals.items()}
    whole = sum(weights.values())
    rows = [
        RoundingScore(*key, weight / whole, math.nan, float(found[key].divergence.mean()))
        for key, weight in sorted(weights.items(), key=lambda item: -item[1])
    ]
    average = sum(row.probability * row.kld_mean for row in rows)
    spread = math.sqrt(sum(row.probability * (row.kld_mean - average) ** 2 for row in rows))
    return rows, Estimate(average, spread)


def _report(
    client: EndpointClient,
    job: EndpointJob,
    probe: Probe,
    rows: list[RoundingScore],
    kld: Estimate,
    agreement: float,
    renormalized: bool,
) -> EndpointReport:
    weights = _marginal(rows, [row.weights for row in rows])
    most_like = max(weights, key=lambda name: weights[name])
    same = [row for row in rows if row.weights == most_like]
    kv = _marginal(same, [row.kv for row in same])
    most_like_kv = max(kv, key=lambda name: kv[name])
    low, high = kld.interval()
    return EndpointReport(
        kld_mean=kld.value,
        kld_stderr=kld.stderr,
        kld_low=max(0.0, low),
        kld_high=high,
        most_like=most_like,
        confidence=weights[most_like],
        most_like_kv=most_like_kv,
        kv_confidence=kv[most_like_kv] / max(weights[most_like], 1e-300),
        candidates=tuple(rows),
        top1_agreement=agreement,
        method=probe.method,
        positions=len(probe.rows),
        visible_tokens=float(np.mean([len(each) for each in probe.ids])),
        rerun_noise=probe.rerun_noise,
        renormalized=renormalized,
        url=client.url,
        model=client.model,
        reference=str(job.reference),
    )


def _marginal(rows: Sequence[RoundingScore], names: Sequence[str]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for row, name in zip(rows, names, strict=True):
        totals[name] = totals.get(name, 0.0) + row.probability
    return totals
