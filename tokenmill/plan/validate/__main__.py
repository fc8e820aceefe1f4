"""`python -m tokenmill.plan.validate FILE.csv[.gz] [--write]`: scores as JSON; --write renews plan/data/scores.json."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from tokenmill.plan.validate.poisson_runs import score_runs
from tokenmill.plan.validate.score_table import score_table, write_scores
from tokenmill.plan.validate.scores import score, summarize

rows, skipped = score(Path(sys.argv[1]))
if "--write" in sys.argv:
    write_scores(score_table(rows, score_runs()))
print(json.dumps(asdict(summarize(rows, skipped))))
