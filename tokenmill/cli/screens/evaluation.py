"""The screens of `tokenmill eval perplexity | divergence | task`: the figure with its uncertainty, then its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.cli.render.screen import Bar, Cell, Facts, Result, Screen, Section, Table, Tone, Value, left, right
from tokenmill.cli.render.units import change, count, counted, percent, plain_number

_CERTAIN = 1.96  # standard errors of a two-sided 95 % interval
_LOSS = (0.01, 0.05)  # up to here a gain or nothing to speak of, up to there a warning


def perplexity_screen(result: Result, model: str, text: str) -> Screen:
    headline = f"{model}: perplexity {result['perplexity']:.4f} +/- {result['stderr']:.4f} on {text}"
    how = (
        "second half of each chunk" if result["protocol"] == "llama.cpp" else f"windows every {result['stride']} tokens"
    )
    rows: list[tuple[str, Value]] = [
        ("95% interval", _interval(result["perplexity"], result["stderr"])),
        ("scored", f"{count(result['tokens'])} of {count(result['text_tokens'])} tokens"),
        (
            "protocol",
            f"{result['protocol']}: {counted(result['chunks'], 'chunk')} of {count(result['context'])}, {how}",
        ),
    ]
    return Screen(headline, "plain", [Facts("", rows)])


def _interval(value: float, stderr: float) -> str:
    return f"{value - _CERTAIN * stderr:.4f} to {value + _CERTAIN * stderr:.4f}"


def divergence_screen(result: Result, model: str) -> Screen:
    loss = result["perplexity_ratio"] - 1
    headline = (
        f"{model} against {result['reference']}: KL divergence {plain_number(result['kld_mean'])}, "
        f"same top token {percent(result['top1_agreement'], 1)} of the time, perplexity {change(loss)}"
    )
    kld: list[tuple[Value, ...]] = [
        (name, plain_number(result[key]))
        for name, key in (
            ("mean", "kld_mean"),
            ("median", "kld_median"),
            ("p90", "kld_p90"),
            ("p95", "kld_p95"),
            ("p99", "kld_p99"),
            ("p99.9", "kld_p99_9"),
            ("largest", "kld_max"),
        )
    ]
    columns = tuple(right(str(name)) for name, _ in kld)
    sections: list[Section] = [
        Table("KL divergence of a token, in nats", columns, [tuple(value for _, value in kld)]),
        _quality(result, loss),
        Facts(
            "Measured on",
            [
                ("tokens", f"{count(result['tokens'])} in {counted(result['chunks'], 'chunk')}"),
                ("reference", Cell(result["reference_cache"] or "run beside the model", "dim")),
            ],
        ),
    ]
    notes = [Cell(f"{count(result['nan_count'])} tokens were not finite", "bad")] if result["nan_count"] else []
    return Screen(headline, loss_tone(loss), sections, notes)


def _quality(result: Result, loss: float) -> Table:
    agreement = result["top1_agreement"]
    rows: list[tuple[Value, ...]] = [
        ("same top token", f"{percent(agreement, 1)} +/- {percent(result['top1_stderr'], 1)}", Bar(agreement)),
        (
            "perplexity",
            f"{result['perplexity']:.4f} against {result['reference_perplexity']:.4f}",
            Cell(f"{change(loss)} +/- {percent(result['perplexity_ratio_stderr'], 1)}", loss_tone(loss)),
        ),
        (
            "probability of the true token",
            f"{change(result['probability_change_mean'])} on average",
            f"{percent(result['probability_change_rms'], 1)} root mean square",
        ),
    ]
    return Table("Against the reference", (left(""), left(""), left("")), rows)


def loss_tone(loss: float) -> Tone:
    """Of a rise in perplexity."""
    good, bearable = _LOSS
    return "good" if loss <= good else "warning" if loss <= bearable else "bad"


def task_screen(result: Result, model: str) -> Screen:
    headline = (
        f"{model}: {percent(result['accuracy'], 1)} +/- {percent(result['stderr'], 1)} on {result['task']} "
        f"({result['metric']}, {counted(result['n'], 'item')})"
    )
    rows = [
        (name, percent(each["value"], 1), f"+/- {percent(each['stderr'], 1)}", Bar(each["value"]))
        for name, each in result["metrics"].items()
    ]
    sections: list[Section] = [
        Table("Measures", (left(""), right(""), right(""), left("")), rows),
        Facts(
            "How",
            [
                ("kind", result["kind"].replace("_", " ")),
                ("examples before each item", str(result["num_shots"])),
                *((name.replace("_", " "), plain_number(value)) for name, value in result["summary"].items()),
            ],
        ),
    ]
    comparison = result.get("comparison")
    return Screen(headline, "plain", sections, [_compared(comparison)] if comparison else [])


def _compared(comparison: Mapping[str, Any]) -> Cell:
    low, high = comparison["low"], comparison["high"]
    tone: Tone = "bad" if high < 0 else "good" if low > 0 else "plain"
    verdict = "worse" if high < 0 else "better" if low > 0 else "no difference can be shown"
    p_value = comparison["p_value"]  # None where items are not right or wrong
    text = (
        f"against {comparison['with']}: {change(comparison['difference'])} of items "
        f"({percent(comparison['confidence'])} interval {change(low)} to {change(high)}"
        f"{'' if p_value is None else f', p = {p_value:.3g}'}): {verdict}"
    )
    return Cell(text, tone)
