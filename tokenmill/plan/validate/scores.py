"""Predicted against measured: scores the planning call on a table of measured deployments.

Every row is answered by `estimate` (or `estimate_split`), the functions that plans use, for the lock-step arrivals that
the rows were measured with. Nothing is tuned or left out per row; saturated rows are shown apart as well. Errors are
fractions (0.15 is 15 %). Called by `tokenmill plan --validate` and `python -m tokenmill.plan.validate`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from tokenmill.errors import UserError
from tokenmill.plan.cost.performance import Estimate, SplitEstimate, estimate, estimate_split
from tokenmill.plan.cost.split import SplitDeployment
from tokenmill.plan.cost.step_cost import StepCost
from tokenmill.plan.question.deployment import Deployment
from tokenmill.plan.question.workload import Arrivals
from tokenmill.plan.validate.ranks import spearman
from tokenmill.plan.validate.silicon_rows import SiliconRow, SkippedRow, read_rows

LOCKSTEP = Arrivals("lockstep")


@dataclass(frozen=True, slots=True)
class Scored:
    row: SiliconRow
    predicted: Estimate | SplitEstimate

    @property
    def tpot_error(self) -> float:
        return self.predicted.tpot.value / self.row.tpot_ms - 1.0

    @property
    def ttft_error(self) -> float:
        return self.predicted.ttft.value / self.row.ttft_ms - 1.0

    @property
    def kind(self) -> str:
        if self.row.is_split:
            return "split"
        return "moe" if self.row.is_moe else "dense"


@dataclass(frozen=True, slots=True)
class Validation:
    """Mean absolute errors as fractions. dense, moe and ttft are over all rows of whole engines, saturated or not;
    rows of split pools have their own; `saturated` repeats those that the model takes to be short of KV memory."""

    tpot_mape_dense: float
    tpot_mape_moe: float
    ttft_mape: float
    spearman: float
    rows: int
    tpot_median_error_dense: float
    tpot_median_error_moe: float
    ttft_median_error: float
    ttft_mape_dense: float
    ttft_mape_moe: float
    spearman_dense: float
    spearman_moe: float
    tpot_mape_split: float
    tpot_median_error_split: float
    ttft_mape_split: float
    ttft_median_error_split: float
    spearman_split: float
    tpot_mape_saturated: float
    ttft_mape_saturated: float
    rows_dense: int
    rows_moe: int
    rows_split: int
    rows_saturated: int
    skipped: dict[str, int]


class Predictor:
    """Asks the planning call, keeping the kernel curves of configurations it has seen."""

    def __init__(self) -> None:
        self._costs: dict[tuple[object, ...], StepCost] = {}

    def cost(self, d: Deployment) -> StepCost:
        key = (d.model.name, d.device.name, d.engine, d.weights, d.kv_bytes, d.parallelism)
        if key not in self._costs:
            self._costs[key] = StepCost(d)
        return self._costs[key]

    def predict(self, row: SiliconRow) -> Estimate | SplitEstimate:
        d = row.deployment
        if isinstance(d, SplitDeployment):
            return estimate_split(d, row.load, (self.cost(d.prefill), self.cost(d.decode)), LOCKSTEP)
        return estimate(d, row.load, self.cost(d), arrivals=LOCKSTEP)


def validate(path: Path) -> Validation:
    scored, skipped = score(path)
    if not scored:
        raise UserError(f"{path} holds no rows that can be predicted", f"skipped: {dict(skipped)}")
    return summarize(scored, skipped)


def score(path: Path) -> tuple[list[Scored], Counter[str]]:
    predictor, scored, skipped = Predictor(), [], Counter[str]()
    for row in read_rows(Path(path)):
        if isinstance(row, SkippedRow):
            skipped[row.reason] += 1
            continue
        try:
            scored.append(Scored(row, predictor.predict(row)))
        except UserError as error:
            skipped["does not fit into memory" if "does not fit" in error.problem else error.problem] += 1
    return scored, skipped


def summarize(scored: Sequence[Scored], skipped: Counter[str]) -> Validation:
    dense, moe, split = ([one for one in scored if one.kind == kind] for kind in ("dense", "moe", "split"))
    whole = [*dense, *moe]
    saturated = [one for one in whole if one.predicted.saturated]
    return Validation(
        tpot_mape_dense=_mean(abs(one.tpot_error) for one in dense),
        tpot_mape_moe=_mean(abs(one.tpot_error) for one in moe),
        ttft_mape=_mean(abs(one.ttft_error) for one in whole),
        spearman=_rank_correlation(whole),
        rows=len(scored),
        tpot_median_error_dense=_median(abs(one.tpot_error) for one in dense),
        tpot_median_error_moe=_median(abs(one.tpot_error) for one in moe),
        ttft_median_error=_median(abs(one.ttft_error) for one in whole),
        ttft_mape_dense=_mean(abs(one.ttft_error) for one in dense),
        ttft_mape_moe=_mean(abs(one.ttft_error) for one in moe),
        spearman_dense=_rank_correlation(dense),
        spearman_moe=_rank_correlation(moe),
        tpot_mape_split=_mean(abs(one.tpot_error) for one in split),
        tpot_median_error_split=_median(abs(one.tpot_error) for one in split),
        ttft_mape_split=_mean(abs(one.ttft_error) for one in split),
        ttft_median_error_split=_median(abs(one.ttft_error) for one in split),
        spearman_split=_rank_correlation(split),
        tpot_mape_saturated=_mean(abs(one.tpot_error) for one in saturated),
        ttft_mape_saturated=_mean(abs(one.ttft_error) for one in saturated),
        rows_dense=len(dense),
        rows_moe=len(moe),
        rows_split=len(split),
        rows_saturated=len(saturated),
        skipped=dict(skipped),
    )


def _mean(values: Iterable[float]) -> float:
    return fmean(line) if (line := list(values)) else 0.0


def _median(values: Iterable[float]) -> float:
    return median(line) if (line := list(values)) else 0.0


def _rank_correlation(scored: Sequence[Scored]) -> float:
    return spearman([one.predicted.tpot.value for one in scored], [one.row.tpot_ms for one in scored])
