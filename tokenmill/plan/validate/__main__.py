"""`python -m tokenmill.plan.validate FILE.csv[.gz] [--residuals]`: scores as JSON, or the residuals as TOML."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from tokenmill.plan.validate.scores import residuals, score, summarize

rows, skipped = score(Path(sys.argv[1]))
print(residuals(rows) if "--residuals" in sys.argv else json.dumps(asdict(summarize(rows, skipped))))
