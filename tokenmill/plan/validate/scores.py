"""Predicted against measured: scores the performance model on a table of measured deployments.

Every aggregated row is predicted twice: by the closed loop, which models a benchmark whose users all start at once (as
the rows are), and by the steady state, which plans use. Nothing is tuned per row. Errors are fractions (0.15 is 15 %).
Called by `tokenmill plan --validate` and `python -m tokenmill.plan.validate`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from tokenmill.errors import UserError
from tokenmill.plan.cost.closed_loop import LoopResult, Scheduling, run_closed_loop
from tokenmill.plan.cost.steady_state import SteadyState, steady_state
from tokenmill.plan.cost.step_cost import StepCost
from tokenmill.plan.question.deployment import concurrent_sequences
from tokenmill.plan.validate.silicon_rows import SiliconRow, SkippedRow, read_rows


@dataclass(frozen=True, slots=True)
class Scored:
    row: SiliconRow
    predicted: LoopResult
    steady: SteadyState  # what a plan would promise

    @property
    def tpot_error(self) -> float:
        return self.predicted.tpot_ms / self.row.tpot_ms - 1.0

    @property
    def steady_tpot_error(self) -> float:
        return self.steady.tpot_ms / self.row.tpot_ms - 1.0

    @property
    def ttft_error(self) -> float:
        return self.predicted.ttft_ms / self.row.ttft_ms - 1.0


@dataclass(frozen=True, slots=True)
class Validation:
    """Mean absolute errors as fractions; TTFT over dense rows below saturation, rank correlation over dense TPOT.
    `steady_` is the steady state that plans use; its TTFT is not scored, since the rows hold cold starts."""

    tpot_mape_dense: float
    tpot_mape_moe: float
    ttft_mape: float
    spearman: float
    rows: int
    tpot_median_error_dense: float
    tpot_median_error_moe: float
    ttft_median_error: float
    steady_tpot_mape_dense: float
    steady_tpot_mape_moe: float
    steady_tpot_median_error_dense: float
    steady_tpot_median_error_moe: float
    ttft_mape_moe: float
    spearman_moe: float
    rows_dense: int
    rows_moe: int
    rows_saturated: int
    skipped: dict[str, int]


class Predictor:
    """Predicts rows, keeping the kernel curves of configurations it has seen."""

    def __init__(self) -> None:
        self._costs: dict[str, StepCost] = {}

    def cost(self, row: SiliconRow) -> StepCost:
        if row.group not in self._costs:
            self._costs[row.group] = StepCost(row.deployment)
        return self._costs[row.group]

    def predict(self, row: SiliconRow, cost: StepCost | None = None) -> LoopResult:
        cost = cost or self.cost(row)
        return run_closed_loop(cost, row.load, _scheduling(row, cost))

    def steady(self, row: SiliconRow, cost: StepCost | None = None) -> SteadyState:
        cost = cost or self.cost(row)
        return steady_state(cost.step_ms, row.load, _scheduling(row, cost))


def _scheduling(row: SiliconRow, cost: StepCost) -> Scheduling:
    d, load = row.deployment, row.load
    tokens = (load.input_tokens + load.output_tokens) * (1.0 - load.spread / 2)
    room = max(1, concurrent_sequences(d, round(tokens)))
    return Scheduling(d.batch_tokens * d.data_parallel, cost.costs.mixed, room, cost.costs.request_ms)


def validate(path: Path) -> Validation:
    scored, skipped = score(path)
    if not scored:
        raise UserError(f"{path} holds no aggregated rows that can be predicted", f"skipped: {dict(skipped)}")
    return summarize(scored, skipped)


def score(path: Path) -> tuple[list[Scored], Counter[str]]:
    predictor, scored, skipped = Predictor(), [], Counter[str]()
    for row in read_rows(Path(path)):
        if isinstance(row, SkippedRow):
            skipped[row.reason] += 1
        else:
            scored.append(Scored(row, predictor.predict(row), predictor.steady(row)))
    return scored, skipped


def summarize(scored: Sequence[Scored], skipped: Counter[str]) -> Validation:
    dense = [one for one in scored if not one.row.deployment.model.is_moe]
    moe = [one for one in scored if one.row.deployment.model.is_moe]
    free = [one for one in dense if not one.predicted.saturated]
    free_moe = [one for one in moe if not one.predicted.saturated]
    return Validation(
        tpot_mape_dense=_mean(abs(one.tpot_error) for one in dense),
        tpot_mape_moe=_mean(abs(one.tpot_error) for one in moe),
        ttft_mape=_mean(abs(one.ttft_error) for one in free),
        spearman=_rank_correlation(dense),
        rows=len(scored),
        tpot_median_error_dense=_median(abs(one.tpot_error) for one in dense),
        tpot_median_error_moe=_median(abs(one.tpot_error) for one in moe),
        ttft_median_error=_median(abs(one.ttft_error) for one in free),
        steady_tpot_mape_dense=_mean(abs(one.steady_tpot_error) for one in dense),
        steady_tpot_mape_moe=_mean(abs(one.steady_tpot_error) for one in moe),
        steady_tpot_median_error_dense=_median(abs(one.steady_tpot_error) for one in dense),
        steady_tpot_median_error_moe=_median(abs(one.steady_tpot_error) for one in moe),
        ttft_mape_moe=_mean(abs(one.ttft_error) for one in free_moe),
        spearman_moe=_rank_correlation(moe),
        rows_dense=len(dense),
        rows_moe=len(moe),
        rows_saturated=len(scored) - len(free) - len(free_moe),
        skipped=dict(skipped),
    )


def _mean(values: Iterable[float]) -> float:
    return fmean(line) if (line := list(values)) else 0.0


def _median(values: Iterable[float]) -> float:
    return median(line) if (line := list(values)) else 0.0


def _rank_correlation(scored: Sequence[Scored]) -> float:
    return spearman([one.predicted.tpot_ms for one in scored], [one.row.tpot_ms for one in scored])


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; equal values share their mean rank."""
    if len(first) < 2:
        return 0.0
    a, b = _ranks(first), _ranks(second)
    mean = (len(a) + 1) / 2
    covariance = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    scale = (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5
    return covariance / scale if scale else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in range(start, end + 1):
            ranks[order[place]] = (start + end) / 2 + 1
        start = end + 1
    return ranks


def residuals(scored: Sequence[Scored]) -> str:
    """P10 and P90 of measured over predicted below saturation, as plan/data/residuals.toml holds them."""
    lines = []
    for metric in ("tpot", "ttft"):
        lines.append(f"\n[residual.{metric}]")
        groups: dict[str, list[float]] = {}
        for one in scored:
            if one.predicted.saturated:
                continue
            kind = "moe" if one.row.deployment.model.is_moe else "dense"
            ratio = 1.0 / (1.0 + (one.tpot_error if metric == "tpot" else one.ttft_error))
            for engine in ("any", one.row.deployment.engine):
                groups.setdefault(f"{engine}-{kind}", []).append(ratio)
        for name, ratios in sorted(groups.items()):
            ratios.sort()
            low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
            lines.append(f"{name} = [{low:.3f}, {high:.3f}]  # {len(ratios)} rows")
    return "\n".join(lines)
