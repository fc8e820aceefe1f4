"""How well predictions rank weight choices on this machine: predicted against measured speed, by Spearman's rank
correlation.

    python benchmarks/prediction_rank.py [MODEL] [--types Q4_0,Q8_0,...] [--device cpu] [--input-len 64] ...

Kernels are probed, every choice is quantized without calibration and timed beside F16 on the same requests. Minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from tokenmill.optimize.candidates import Candidate
from tokenmill.optimize.evidence import compare_speed
from tokenmill.optimize.machine_laboratory import MachineLaboratory
from tokenmill.optimize.quality import QualityPlan
from tokenmill.optimize.question import OptimizeJob
from tokenmill.optimize.setup import make_predictor, prepare
from tokenmill.optimize.store import Store
from tokenmill.optimize.traffic import TrafficRequest

_TYPES = "Q4_0,Q4_1,Q5_0,Q5_1,Q8_0,Q2_K,Q3_K_M,Q4_K_M,Q5_K_M,Q6_K,IQ4_NL,F32"
_BASE = "F16"


def spearman(first: list[float], second: list[float]) -> float:
    ranks = [np.argsort(np.argsort(values)) for values in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--types", default=_TYPES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=4)
    options = parser.parse_args()
    names = options.types.split(",")
    with tempfile.TemporaryDirectory() as folder:
        job = OptimizeJob(
            options.model,
            Path(folder),
            traffic=TrafficRequest(options.input_len, options.output_len, options.concurrency),
            candidates=tuple(names),
            device=options.device,
        )
        setup, store = prepare(job), Store(job.out, "ranks")
        predictor = make_predictor(setup, store)
        assert predictor is not None, "the planner does not know this model"
        quality = QualityPlan(setup.text, job.effort.context, 1, 1, job.max_quality_loss, None)
        lab = MachineLaboratory(store, setup.traffic, setup.engine, setup.artefacts, quality)
        rows = []
        try:
            kv, tokens = setup.space.default_kv, setup.space.batch_tokens[0]
            base = Candidate(_BASE, kv, tokens).result()
            lab.build(base, float("inf"))
            for name in names:
                result = Candidate(name, kv, tokens).result()
                lab.build(result, float("inf"))
                runs, own = lab.pair("rank", base, result)
                speedup = 1 / compare_speed(runs, own).cost_ratio
                if not rows:
                    predictor.settle(_BASE, {name: speedup})
                rows.append((name, predictor.predict(name).speedup, speedup))
                print(f"{name:10s} predicted {rows[-1][1]:5.2f} x  measured {rows[-1][2]:5.2f} x", flush=True)
        finally:
            lab.close()
    predicted, measured = ([row[column] for row in rows] for column in (1, 2))
    print(json.dumps({"types": len(rows), "spearman": round(spearman(predicted, measured), 3)}))


if __name__ == "__main__":
    main()
