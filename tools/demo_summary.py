"""The closing lines of `make demo`: for each output directory of `optimize`, both savings, the loss, the report.

Reads results.json only. Called by the Makefile.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def span(saving: dict[str, Any] | None) -> str:
    if saving is None:
        return "not measured"
    if saving["low"] is None:
        return f"{saving['share']:.1%}"
    return f"{saving['share']:.1%} ({saving['low']:.1%} to {saving['high']:.1%})"


def lines(folder: Path) -> list[str]:
    found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    source = "already quantized" if found["source_quantized"] else "in full precision"
    loss = "not measured" if found["quality_off"] else f"{found['quality_loss'] or 0:+.2%} of perplexity"
    timed = [each for each in found["candidates"] if each["speed"]]
    proven = [each for each in timed if each["quality"] and each["verdict"] in ("chosen", "tied", "passed")]
    return [
        f"{found['model']}, a source {source}: {found['chosen']['name'] if found['chosen'] else 'nothing cheaper'}",
        f"  saving against today:       {span(found['saving_today'])}",
        f"  saving against unquantized: {span(found['saving'])}",
        f"  quality loss:               {loss}",
        f"  candidates:                 {len(found['candidates'])}, {len(timed)} timed, {len(proven)} proven",
        f"  report:                     {folder / 'report.html'}",
        f"  serve it:                   {found['launch_lines'].get('tokenmill', '-')}",
    ]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print("\n" + "\n".join(lines(Path(name))))
