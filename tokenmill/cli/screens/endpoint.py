"""The screen of `tokenmill eval endpoint`: the verdict, the roundings by probability, and how it was measured."""

from __future__ import annotations

import math

from tokenmill.cli.render.screen import Bar, Cell, Facts, Result, Screen, Section, Table, Tone, Value, left, right
from tokenmill.cli.render.units import count, percent, plain_number

_SHOWN = 8
_OTHER = "another rounding"  # as evaluate/rounding_match.py calls it
_SURE, _LIKELY = 0.95, 0.6
_METHODS = {
    "prompt": "log-probabilities of the tokens of the prompt",
    "generated": "log-probabilities of generated tokens",
    "answers": "sampled answers: the endpoint gives no log-probabilities, so little can be told",
}


def endpoint_screen(result: Result) -> Screen:
    confidence = result["confidence"]
    like = result["most_like"]
    verdict = "like none of the known roundings" if like == _OTHER else f"most like {like}"
    headline = (
        f"{result['url']} against {result['reference']}: KL divergence {plain_number(result['kld_mean'])}, "
        f"{verdict} ({percent(confidence, 1)} sure)"
    )
    tone: Tone = "good" if confidence >= _SURE else "plain" if confidence >= _LIKELY else "warning"
    rows: list[tuple[Value, ...]] = [
        (
            each["weights"],
            each["kv"],
            percent(each["probability"], 1),
            Bar(each["probability"]),
            _number(each["distance"]),
            _number(each["kld_mean"]),
        )
        for each in result["candidates"][:_SHOWN]
    ]
    columns = (
        left("weights"),
        left("KV"),
        right("probability"),
        left(""),
        right("distance"),
        right("its own divergence"),
    )
    sections: list[Section] = [Table("Known roundings of the reference", columns, rows), _measured(result)]
    notes = []
    if result["renormalized"]:
        notes.append(Cell("it shows probabilities among its visible tokens only: compared among them", "warning"))
    return Screen(headline, tone, sections, notes)


def _measured(result: Result) -> Facts:
    rows: list[tuple[str, Value]] = [
        ("KL divergence", f"{_number(result['kld_low'])} to {_number(result['kld_high'])}, 95% interval"),
        ("KV", f"most like {result['most_like_kv']} ({percent(result['kv_confidence'], 1)})"),
        ("method", _METHODS[result["method"]]),
        ("positions", f"{count(result['positions'])}, {result['visible_tokens']:.1f} visible tokens each"),
        ("asked again", f"differs by {_number(result['rerun_noise'])} at most"),
    ]
    if not math.isnan(result["top1_agreement"]):
        rows.insert(1, ("same top token", percent(result["top1_agreement"], 1)))
    return Facts("Measured", rows)


def _number(value: float) -> str:
    return "" if math.isnan(value) else plain_number(value)
