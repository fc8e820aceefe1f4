"""How the winner is started (settings, launch lines, manifests), how the run is repeated, and what it ran on."""

from __future__ import annotations

from tokenmill.optimize.results import Outcome
from tokenmill.report.page import code_block, folded, section, table

_SETTINGS = "serve.yaml"  # shown open; longer files are folded


def deployment_sections(outcome: Outcome) -> list[str]:
    return [
        section("Start it", _start(outcome), wide=True),
        section("Repeat it", code_block(outcome.commands) + _facts(outcome), wide=True),
    ]


def _start(outcome: Outcome) -> str:
    lines = code_block(f"# {name}\n{line}" for name, line in outcome.launch_lines.items())
    open_files = {name: text for name, text in outcome.files.items() if name == _SETTINGS}
    shown = [f"<h3>{_SETTINGS}</h3>{code_block([text.rstrip()])}" for text in open_files.values()]
    shown += [
        folded(name, code_block([text.rstrip()])) for name, text in outcome.files.items() if name not in open_files
    ]
    return lines + "".join(shown)


def _facts(outcome: Outcome) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in outcome.versions.items())
    rows = [
        ("machine", outcome.machine),
        ("device", outcome.device),
        ("price", f"${outcome.price:.4g} an hour, {outcome.price_basis}"),
        ("traffic", outcome.workload_words),
        ("latency objectives", outcome.objectives or "none"),
        ("text", "none: --quality off" if outcome.quality_off else outcome.quality_text),
        ("source", outcome.source),
        ("versions", versions),
        ("seed", str(outcome.seed)),
        ("date", outcome.date),
        ("duration", f"{outcome.seconds:.0f} s"),
    ]
    return table(("run", "value"), [row for row in rows if row[1]])
