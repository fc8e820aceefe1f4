"""The sentences that the terminal, the report and the JSON share: savings against both baselines, the source, what a
run does not show.

One place, so that no output leaves out what another one admits. Pure functions of an outcome. Called by cli/screens and
by optimize/report.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.optimize.results import (
    CHOSEN,
    FAILED,
    PASSED,
    TIE_MARGIN,
    TIED,
    UNTRIED,
    Outcome,
    Quality,
    Saving,
    TaskScore,
    saving,
)

_NAMES = 8  # of a list; results.json has all
NO_OBJECTIVE = "no latency objective was given: throughput decides"
NO_QUALITY = "quality was not measured (--quality off)"
MADE_UP = "The weights are made up (--load-format dummy): speeds of the shape, nothing is claimed about quality."


def share(value: float) -> str:
    """Whole percents; a digit more where that would read as nothing."""
    return f"{value:.1%}" if value and abs(value) < 0.01 else f"{value:.0%}"


def interval(saved: Saving) -> str:
    if saved.low is None or saved.high is None:
        return "one replay each"
    return f"{share(saved.low)} to {share(saved.high)}"


def saving_words(saved: Saving | None) -> str:
    """ "60% (58% to 62%)"."""
    return f"{share(saved.share)} ({interval(saved)})" if saved else "not measured"


def cheaper_words(saved: Saving, reference: str) -> str:
    """ "60% cheaper than REFERENCE (58% to 62%)"."""
    word = "cheaper" if saved.share >= 0 else "more expensive"
    bounds = f" ({interval(saved)})" if saved.share >= 0 and saved.low is not None else ""
    return f"{share(abs(saved.share))} {word} than {reference}{bounds}"


def source_words(outcome: Outcome) -> str:
    if outcome.made_up:
        return "the weights are made up (--load-format dummy), speed only"
    return "the source is already quantized" if outcome.source_quantized else "the source is in full precision"


def today_words(outcome: Outcome) -> str:
    today = outcome.today
    if today is None:
        return "not measured"
    if today is outcome.baseline:
        return f"{today.name}, as stored"
    served = f"{today.name} on {today.engine}" if today.engine not in today.name else today.name
    return f"{served}, already quantized" if outcome.source_quantized else served


def baseline_words(outcome: Outcome) -> str:
    if outcome.baseline is None:
        return "not measured"
    return f"{outcome.baseline.name}, expanded" if outcome.source_quantized else outcome.baseline.name


def headline(outcome: Outcome) -> str:
    """Both savings with their intervals, and what the source was, in one line."""
    if outcome.chosen is None:
        if outcome.state != "complete":
            return f"nothing chosen yet: this run is {outcome.state} ({source_words(outcome)})"
        found = "was found" if outcome.quality_off else "keeps the quality"
        return f"nothing cheaper {found}: stay with what you have ({source_words(outcome)})"
    parts = [
        cheaper_words(saved, name)
        for saved, name in ((outcome.saving_today, "today"), (outcome.saving, "unquantized"))
        if saved is not None
    ]
    return f"{', '.join(parts) or 'its cost was not compared'}; {source_words(outcome)}"


def loss_words(quality: Quality) -> str:
    return f"{quality.loss:+.2%} ({quality.loss_low:+.2%} to {quality.loss_high:+.2%})"


def task_words(task: TaskScore) -> str:
    return (
        f"{task.accuracy:.1%} against {task.reference_accuracy:.1%} on {task.items:,} items "
        f"({100 * task.low:+.1f} to {100 * task.high:+.1f} points, p={task.p_value:.2g})"
    )


def winner_words(outcome: Outcome) -> str:
    """Who is cheapest on this machine; empty where no rival was asked."""
    if not outcome.rivals:
        return ""
    winner = outcome.winner
    if winner is None:
        return "no engine was accepted"
    if winner is outcome.chosen:
        return f"cheapest on this machine: {winner.name} on tokenmill"
    gap = saving(winner, outcome.chosen, bool(outcome.objectives))
    versus = f", {share(gap.share)} cheaper than the best of tokenmill" if gap is not None else ""
    return f"cheapest on this machine: {winner.name}, not tokenmill{versus}"


def unproven_words(outcome: Outcome) -> str:
    names = _first_of(outcome.unproven)
    return f"cheaper by a first measurement, but not proven: {names}; repeat with more --minutes" if names else ""


def margin_words(outcome: Outcome) -> str:
    """What the final leaves open; empty where that is less than a percent."""
    if outcome.margin <= TIE_MARGIN:
        return ""
    return f"another finalist may be up to {outcome.margin:.1%} cheaper than the choice; more --runs tell them apart"


def counts_words(outcome: Outcome) -> str:
    """ "72, 15 timed, 3 proven"."""
    timed = [each for each in outcome.candidates if each.speed]
    proven = [each for each in timed if each.quality and each.verdict in (CHOSEN, TIED, PASSED)]
    return f"{len(outcome.candidates)}, {len(timed)} timed, {len(proven)} proven"


def _first_of(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES])
    return f"{shown} and {len(names) - _NAMES} more" if len(names) > _NAMES else shown


def not_shown(outcome: Outcome) -> list[str]:
    """What a reader could believe and this run does not prove."""
    found = []
    if outcome.state != "complete":
        found.append(f"This run is {outcome.state}: repeat the command to continue it.")
    if outcome.today is None:
        found.append("What is served today was not measured: the saving against it is unknown.")
    if outcome.source_quantized:
        found.append(
            "The source was already quantized. Losses are against its weights expanded to floats; what the first "
            "quantization lost is not in these figures."
        )
    if outcome.made_up:
        found.append(MADE_UP)
    found += _latency_gaps(outcome) + _quality_gaps(outcome)
    if open_to := margin_words(outcome):
        found.append(f"{open_to[0].upper()}{open_to[1:]}.")
    if outcome.unproven:
        found.append(f"Cheaper by a first measurement, but not proven: {_first_of(outcome.unproven)}.")
    for verdict, what in ((UNTRIED, "left open for lack of time"), (FAILED, "could not be measured")):
        names = [each.name for each in outcome.candidates if each.verdict == verdict]
        if names:
            found.append(f"{len(names)} of {len(outcome.candidates)} candidates {what}: {_first_of(names)}.")
    if outcome.price_basis.startswith("assumed"):
        found.append("The price of this machine is assumed. Savings in percent do not depend on it, dollars do.")
    return found


def _latency_gaps(outcome: Outcome) -> list[str]:
    if not outcome.objectives:
        return [
            "No latency objective was given: throughput decides, with all requests waiting. How long requests wait "
            "under your own arrivals is not shown."
        ]
    if outcome.chosen is not None and outcome.chosen.latency is None:
        return ["The arrivals were not replayed against the chosen candidate."]
    found = outcome.saving
    return (
        ["Savings within the objective come from one replay each and have no interval."]
        if found and found.low is None
        else []
    )


def _quality_gaps(outcome: Outcome) -> list[str]:
    if outcome.quality_off:
        return ["Quality was not measured (--quality off): these are speeds, not a proof that answers stay the same."]
    chosen = outcome.chosen
    if chosen is None or chosen.tasks:
        return []
    return [f"No task was given: quality is perplexity and divergence on {outcome.quality_text}."]
