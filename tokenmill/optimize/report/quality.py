"""Quality of what was proven: perplexity and divergence with intervals, tasks paired by item, checks of answers."""

from __future__ import annotations

from tokenmill.optimize.results import CHOSEN, CandidateResult, Outcome
from tokenmill.optimize.wording import MADE_UP, NO_QUALITY, loss_words
from tokenmill.report.page import paragraphs, section, table


def quality_section(outcome: Outcome) -> str:
    if outcome.quality_off:
        text = f"{NO_QUALITY.capitalize()}: these figures say nothing of what the answers are worth."
        return section("Quality", paragraphs([MADE_UP, text] if outcome.made_up else [text]), wide=True)
    proven = [each for each in (*outcome.candidates, *outcome.rivals) if each.quality or each.tasks or each.checks]
    proven.sort(key=lambda each: each.verdict != CHOSEN)
    limits = [f"perplexity at most {outcome.max_quality_loss:+.1%}"]
    limits += [f"mean divergence at most {outcome.max_kld:g}"] if outcome.max_kld is not None else []
    limits += [f"a task at most {100 * outcome.max_task_loss:g} points"] if any(each.tasks for each in proven) else []
    note = f"on {outcome.quality_text}; limits: {', '.join(limits)}; intervals are 95 %"
    content = _texts(proven) + _tasks(proven) + _checks(proven)
    return section("Quality", content or paragraphs(["Nothing was proven yet."]), note, wide=True)


def _texts(proven: list[CandidateResult]) -> str:
    head = (
        "candidate", "verdict", "perplexity", "change (95 %)", "KL divergence, mean", "p99", "same top token", "tokens",
    )  # fmt: skip
    rows = []
    for each in proven:
        quality = each.quality
        if quality is None:
            continue
        rows.append(
            [
                each.name,
                each.verdict,
                f"{quality.perplexity:.4g} against {quality.reference_perplexity:.4g}",
                loss_words(quality),
                f"{quality.kld_mean:.4f}",
                f"{quality.kld_p99:.3f}",
                f"{quality.top1_agreement:.1%}",
                f"{quality.tokens:,}",
            ]
        )
    return table(head, rows, 0 if rows and rows[0][1] == CHOSEN else -1)


def _tasks(proven: list[CandidateResult]) -> str:
    head = ("candidate", "task", "items", "accuracy", "unquantized", "difference, points (95 %)", "McNemar p")
    rows = [
        [
            each.name,
            task.name,
            f"{task.items:,}",
            f"{task.accuracy:.1%}",
            f"{task.reference_accuracy:.1%}",
            f"{100 * (task.accuracy - task.reference_accuracy):+.1f} ({100 * task.low:+.1f} to {100 * task.high:+.1f})",
            f"{task.p_value:.2g}",
        ]
        for each in proven
        for task in each.tasks
    ]
    return f"<h3>Tasks</h3>{table(head, rows)}" if rows else ""


def _checks(proven: list[CandidateResult]) -> str:
    head = ("candidate", "check", "value", "unquantized", "limit", "verdict")
    rows = [
        [each.name, check.name, *(f"{value:.4g}" for value in (check.value, check.reference, check.limit)),
         check.refusal or "passed"]
        for each in proven
        for check in each.checks
    ]  # fmt: skip
    return f"<h3>Generated text and long contexts</h3>{table(head, rows)}" if rows else ""
