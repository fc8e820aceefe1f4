"""The screen of `tokenmill train-draft`: how often the head's guesses hold, by how far ahead they are."""

from __future__ import annotations

from tokenmill.cli.render.screen import Bar, Facts, Lines, Result, Screen, Table, Value, left, right
from tokenmill.cli.render.units import count, duration, percent, quantity


def train_draft_screen(result: Result, model: str) -> Screen:
    first = result["acceptance"][0] if result["acceptance"] else None
    headline = (
        f"{result['kind']} head for {model}: {percent(first)} of first guesses hold, "
        f"{_tokens_per_step(result['acceptance']):.2f} tokens a step"
    )
    rows: list[tuple[Value, ...]] = [
        (f"{number} ahead", percent(share), Bar(share, "good" if share >= 0.5 else "warning"))
        for number, share in enumerate(result["acceptance"], 1)
    ]
    layers = ", ".join(map(str, result["layers"])) or "none"
    facts = Facts(
        "Training",
        [
            ("size", f"{quantity(result['parameters'])} parameters, looks at layers {layers}"),
            ("written to", result["path"]),
            ("learned from", f"{count(result['tokens'])} tokens in {duration(result['seconds'])}"),
        ],
    )
    use = Lines("Use it", [f"tokenmill serve {model} --speculate head:{result['path']}"])
    return Screen(
        headline,
        "plain",
        [
            Table("Guesses that hold, of those whose predecessors held", (left(""), right(""), left("")), rows),
            facts,
            use,
        ],
    )


def _tokens_per_step(acceptance: list[float]) -> float:
    """Each share is of the guesses whose predecessors held; the model's own token comes on top."""
    expected, alive = 1.0, 1.0
    for share in acceptance:
        alive *= share
        expected += alive
    return expected
