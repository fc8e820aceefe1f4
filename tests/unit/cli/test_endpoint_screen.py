"""The screen of `eval endpoint`: the verdict first, how sure it is, and what it was measured on."""

from __future__ import annotations

import math
from dataclasses import asdict

from tokenmill.cli.render.draw import as_text
from tokenmill.cli.screens.endpoint import endpoint_screen
from tokenmill.evaluate.endpoint_report import EndpointReport, RoundingScore
from tokenmill.evaluate.rounding_match import OTHER


def _report(most_like: str, confidence: float, method: str = "prompt") -> dict[str, object]:
    rows = (
        RoundingScore(most_like, "unquantized", confidence, 0.01, 0.145),
        RoundingScore(OTHER, "", 1 - confidence, 0.7, math.nan),
    )
    report = EndpointReport(
        kld_mean=0.1451,
        kld_stderr=0.004,
        kld_low=0.137,
        kld_high=0.153,
        most_like=most_like,
        confidence=confidence,
        most_like_kv="unquantized",
        kv_confidence=0.9,
        candidates=rows,
        top1_agreement=math.nan if method == "answers" else 0.72,
        method=method,
        positions=640,
        visible_tokens=20.5,
        rerun_noise=0.0,
        renormalized=False,
        url="http://127.0.0.1:8000",
        model="m",
        reference="stories15m",
    )
    return asdict(report)


def test_the_verdict_comes_first() -> None:
    screen = endpoint_screen(_report("Q4_K_M", 0.991))
    assert screen.headline.endswith("most like Q4_K_M (99.1% sure)")
    text = as_text(screen)
    for line in ("Known roundings of the reference", "640, 20.5 visible tokens each", "72.0%"):
        assert line in text
    assert "nan" not in text


def test_what_fits_nothing_is_said_plainly() -> None:
    assert "like none of the known roundings" in endpoint_screen(_report(OTHER, 0.8)).headline


def test_sampled_answers_are_said_to_tell_little() -> None:
    text = as_text(endpoint_screen(_report("F16", 0.3, "answers")))
    assert "sampled answers" in text
    assert "same top token" not in text
