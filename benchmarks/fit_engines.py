"""Fits the constants of tokenmill/plan/data/engines.toml on measured rows, and proves that they carry over.

    python benchmarks/fit_engines.py silicon.csv.gz ENGINE [--part dense|moe] [--rows 120] [--rounds 2]
                                                         [--half even|odd|all]

A pattern search over a few constants per engine, on a sample of rows of half the measured configurations (or all);
prints the errors on the fitted half and on the other. Writes nothing: copy the line it prints.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import fmean, median
from zlib import crc32

from tokenmill.plan.cost.engine_costs import EngineCosts, engine_costs
from tokenmill.plan.cost.performance import estimate
from tokenmill.plan.question.deployment import Deployment
from tokenmill.plan.validate.scores import LOCKSTEP, Predictor, Scored
from tokenmill.plan.validate.silicon_rows import SiliconRow, read_rows

# Dense rows settle what every model shares; rows with experts then settle the rest.
STEPS = {
    "dense": {"eager_us": 1.5, "request_ms": 1.6, "layer_us": 1.5, "kernel": 1.1, "step_ms": 1.5},
    "moe": {"eager_expert_us": 1.5, "eager_latent_us": 1.5, "experts": 1.1},
}
TTFT_WEIGHT = 0.35
CLIP = 0.8  # beyond this a row says more about its run than about the model


class Fit:
    def __init__(self, rows: Sequence[SiliconRow]) -> None:
        self.rows, self.predictor = rows, Predictor()

    def scored(self, costs: EngineCosts) -> list[Scored]:
        found = []
        for row in self.rows:
            assert isinstance(row.deployment, Deployment)
            cost = self.predictor.cost(row.deployment).with_costs(costs)
            load = replace(row.load, spread=costs.drift)
            found.append(Scored(row, estimate(row.deployment, load, cost, arrivals=LOCKSTEP)))
        return found

    def loss(self, costs: EngineCosts) -> float:
        scored = self.scored(costs)
        tpot = fmean(min(abs(log(1 + one.tpot_error)), CLIP) for one in scored)
        return tpot + TTFT_WEIGHT * fmean(min(abs(log(1 + one.ttft_error)), 1.5 * CLIP) for one in scored)

    def search(self, costs: EngineCosts, part: str, rounds: int) -> EngineCosts:
        best, steps = self.loss(costs), dict(STEPS[part])
        for _ in range(rounds):
            for name, step in steps.items():
                for factor in (step, 1 / step):
                    while True:
                        trial = replace(costs, **{name: getattr(costs, name) * factor})
                        loss = self.loss(trial)
                        if loss >= best - 1e-4:
                            break
                        costs, best = trial, loss
            steps = {name: 1 + (step - 1) * 0.5 for name, step in steps.items()}
            print(f"{best:.4f} {costs}", flush=True)
        return costs


def report(label: str, scored: Sequence[Scored]) -> None:
    free = [one.ttft_error for one in scored]
    tpot = [one.tpot_error for one in scored]
    print(
        f"{label}: {len(scored)} rows, TPOT {fmean(map(abs, tpot)):.3f} (median {median(tpot):+.3f}), "
        f"TTFT {fmean(map(abs, free)):.3f} (median {median(free):+.3f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("table", type=Path)
    parser.add_argument("engine")
    parser.add_argument("--rows", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--part", default="dense", choices=("dense", "moe"))
    parser.add_argument("--half", default="all", choices=("even", "odd", "all"))
    options = parser.parse_args()
    rows = [row for row in read_rows(options.table) if isinstance(row, SiliconRow) and not row.is_split]
    rows = [row for row in rows if row.deployment.engine == options.engine and row.load.concurrency <= 256]
    rows = [row for row in rows if row.is_moe == (options.part == "moe")]
    random.Random(7).shuffle(rows)
    halves = {"even": [row for row in rows if crc32(row.group.encode()) % 2 == 0]}
    halves["odd"] = [row for row in rows if crc32(row.group.encode()) % 2 == 1]
    halves["all"] = rows
    fit = Fit(halves[options.half][: options.rows])
    costs = engine_costs(options.engine)
    report("before", fit.scored(costs))
    costs = fit.search(costs, options.part, options.rounds)
    report("fitted rows", fit.scored(costs))
    other = {"even": "odd", "odd": "even", "all": "all"}[options.half]
    report(f"half '{other}'", Fit(halves[other][: 2 * options.rows]).scored(costs))
    print(costs)


if __name__ == "__main__":
    main()
