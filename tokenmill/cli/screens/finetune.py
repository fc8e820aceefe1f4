"""The screen of `tokenmill finetune`: whether the held-out loss fell, the curve, and what came back."""

from __future__ import annotations

import math

from tokenmill.cli.render.plot import plot
from tokenmill.cli.render.screen import Facts, Lines, Result, Screen, Section, Table, left, right
from tokenmill.cli.render.units import count, duration, percent, plain_number, quantity


def finetune_screen(result: Result) -> Screen:
    before, after, repair = result["loss_before"], result["loss_after"], result["repair"]
    what = "divergence from the teacher" if repair else "loss"
    headline = (
        f"Wrote {result['path']}: rank {result['rank']}, held-out {what} {before:.4f} -> {after:.4f} nats a token"
        + (f", {percent(repair['loss_won_back'])} of the lost quality won back" if repair else "")
    )
    curve = plot(
        [
            (".", [(step, loss) for step, loss in enumerate(result["losses"], 1)]),
            ("o", [(step, loss) for step, loss in result["held_out"]]),
        ],
        "step",
    )
    sections: list[Section] = [Lines(f"{what.capitalize()} (. training, o held out)", curve)]
    if repair:
        rows = [
            ("teacher", plain_number(math.exp(repair["teacher_loss"])), "0"),
            ("base", plain_number(math.exp(repair["base_loss"])), f"{repair['base_divergence']:.4g}"),
            (
                "base with the adapter",
                plain_number(math.exp(repair["tuned_loss"])),
                f"{repair['tuned_divergence']:.4g}",
            ),
            ("won back", percent(repair["loss_won_back"]), percent(repair["divergence_won_back"])),
        ]
        columns = (left(""), right("perplexity"), right("divergence, nats"))
        sections.append(Table(f"On {count(result['held_out_tokens'])} held-out tokens", columns, rows))
    resumed = f", resumed after step {result['resumed_from']}" if result["resumed_from"] else ""
    facts = [
        ("trained", f"{quantity(result['parameters'])} parameters of {result['modules']} modules ({result['method']})"),
        ("learned from", f"{count(result['tokens'])} tokens in {result['steps']} steps{resumed}"),
        ("took", f"{duration(result['seconds'])} on {result['device']}"),
        ("report", result["html"]),
    ]
    use = Lines("Use it", [f"tokenmill convert {result['model']} OUT --adapter {result['path']}"])
    return Screen(headline, "good" if after < before else "warning", [*sections, Facts("Run", facts), use])
