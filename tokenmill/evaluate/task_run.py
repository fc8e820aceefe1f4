"""Runs a task file on a model: finds its kind, checks its items, lets the task answer, sums up.

Everything wrong with the input is refused before a model is loaded. With a reference model the same items are put to
both and paired. Called by `tokenmill eval task`; `optimize` puts a TaskFile to engines that it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.sources import resolve
from tokenmill.config import EngineConfig
from tokenmill.engine.llm import LLM
from tokenmill.errors import UserError, unknown_name
from tokenmill.evaluate.likelihood import Progress, no_progress
from tokenmill.evaluate.results import check_writable, compare_with, read_jsonl, read_metrics, write_results
from tokenmill.evaluate.statistics import mean
from tokenmill.evaluate.task_pairs import CONFIDENCE, pair_task
from tokenmill.evaluate.tasks import TASKS
from tokenmill.evaluate.tasks.base import Item, ItemResult, Task, TaskOptions
from tokenmill.log import get_logger

_log = get_logger(__name__)
_CONTEXT = 2048
_CONCURRENCY = 16


@dataclass(frozen=True, slots=True)
class TaskJob:
    task: Path
    kind: str = ""  # empty: by the fields of the items
    limit: int = 0  # 0: all items
    shots: Path | None = None  # a file of the same kind to take examples from
    num_shots: int | None = None
    chat: bool | None = None
    max_tokens: int = 0
    out: Path | None = None
    compare: Path | None = None
    unsafe_code: bool = False

    def __post_init__(self) -> None:
        if self.kind and self.kind not in TASKS:
            raise unknown_name("kind of task", self.kind, TASKS)
        if min(self.limit, self.max_tokens, self.num_shots or 0) < 0:
            raise UserError("a limit is negative", "give --limit, --max-tokens and --num-shots as 0 or more")


@dataclass(frozen=True, slots=True)
class TaskReport:
    task: str
    accuracy: float
    n: int
    stderr: float
    kind: str
    metric: str  # which of the metrics is the accuracy
    num_shots: int
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)  # name -> value and stderr
    summary: dict[str, float] = field(default_factory=dict)  # figures of the whole
    comparison: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TaskFile:
    """The items of a file, checked, and how they are asked."""

    name: str
    kind: str
    task: type[Task]
    options: TaskOptions
    items: list[Item]

    def answer(self, llm: LLM, on_progress: Progress = no_progress) -> list[ItemResult]:
        return self.task(self.options).run(llm, self.items, on_progress)

    def accuracies(self, results: Sequence[ItemResult]) -> list[float]:
        """The metric that is reported as the accuracy, by item."""
        return [result.metrics[self.task.headline] for result in results]


def open_task(job: TaskJob) -> TaskFile:
    numbered = read_jsonl(job.task, job.limit)
    kind = job.kind or detect_kind(numbered[0][1])
    task: type[Task] = TASKS.get(kind)
    items = _checked(job.task, task, kind, numbered)
    return TaskFile(job.task.stem, kind, task, _options(job, task, kind), items)


def run_task(
    model: str, config: EngineConfig, job: TaskJob, on_progress: Progress = no_progress, reference: str = ""
) -> TaskReport:
    """`reference`: a model that answers the same items first, with the same engine options."""
    if reference and job.compare is not None:
        raise UserError("both a reference model and results to compare with are given", "keep one of them")
    file = open_task(job)
    baseline = read_metrics(job.compare) if job.compare is not None else None
    if job.out is not None:
        check_writable(job.out)
    theirs = _answers(reference, config, file, on_progress) if reference else None
    results = _answers(model, config, file, on_progress)
    if job.out is not None:
        write_results(job.out, file.items, results)
    report = _report(file, results)
    if theirs is not None:
        return replace(report, comparison=_paired(file, reference, theirs, results))
    if baseline is not None and job.compare is not None:
        difference = compare_with(job.compare, baseline, file.items, results, file.task.headline)
        report = replace(report, comparison={"with": str(job.compare), **asdict(difference)})
    return report


def _answers(model: str, config: EngineConfig, file: TaskFile, on_progress: Progress) -> list[ItemResult]:
    with LLM(model, task_config(model, config)) as llm:
        llm.use_only_lora()
        return file.answer(llm, on_progress)


def _paired(file: TaskFile, reference: str, theirs: Sequence[ItemResult], ours: Sequence[ItemResult]) -> dict[str, Any]:
    """The fields of --compare, and what only two whole runs can tell."""
    pair = pair_task(file.name, file.accuracies(theirs), file.accuracies(ours))
    low, high = pair.loss.interval(CONFIDENCE)
    return {
        "with": reference,
        "difference": pair.difference,
        "low": pair.low,
        "high": pair.high,
        "confidence": CONFIDENCE,
        "p_value": pair.p_value,
        "n": pair.n,
        "reference_accuracy": pair.reference_accuracy,
        "better": pair.better,
        "worse": pair.worse,
        "loss_low": low,
        "loss_high": high,
    }


def detect_kind(item: Item) -> str:
    """The kind whose fields the item has; the one with the most, if several fit."""
    fitting = [(len(TASKS.get(kind).fields), kind) for kind in TASKS if _missing(TASKS.get(kind), item) is None]
    if not fitting:
        kinds = "; ".join(f"{kind}: {', '.join(TASKS.get(kind).fields)}" for kind in TASKS)
        raise UserError(f"no kind of task has items with the fields {', '.join(item)}", f"write one of {kinds}")
    max_fields = max(number for number, _ in fitting)
    best = [kind for number, kind in fitting if number == max_fields]
    if len(best) > 1:
        raise UserError(f"the items could be of {' or '.join(best)}", "choose with --kind")
    return best[0]


def _missing(task: type[Task], item: Item) -> str | None:
    """Why an item does not fit this task."""
    for name, kind in task.fields.items():
        if name not in item:
            return f"it has no '{name}'"
        if not isinstance(item[name], kind) or isinstance(item[name], bool):
            return f"'{name}' must be of type {kind.__name__}"
    return None


def _checked(path: Path, task: type[Task], kind: str, numbered: Sequence[tuple[int, Item]]) -> list[Item]:
    for number, item in numbered:
        defect = _missing(task, item) or task.defect(item)
        if defect is not None:
            raise UserError(f"line {number} of '{path}' is not an item of {kind}: {defect}", "correct that line")
    return [item for _, item in numbered]


def _options(job: TaskJob, task: type[Task], kind: str) -> TaskOptions:
    if not task.takes_shots and job.shots is not None:
        raise UserError(f"{kind} takes no examples from a file", "leave --shots out")
    if not task.default_num_shots and job.num_shots:
        raise UserError(f"{kind} has no examples", "leave --num-shots out")
    if not task.generates and (job.chat is not None or job.max_tokens):
        raise UserError(
            f"{kind} scores the answers in the file and generates none", "leave --chat and --max-tokens out"
        )
    shots = [] if job.shots is None else _checked(job.shots, task, kind, read_jsonl(job.shots))
    return TaskOptions(shots, job.num_shots, job.chat, job.max_tokens, job.unsafe_code)


def task_config(model: str, config: EngineConfig) -> EngineConfig:
    """Room for the usual prompts, within what the model was trained for, unless the user says otherwise."""
    trained = open_checkpoint(resolve(model).path).description.context_length
    return config.fill("enough for the tasks", context=min(trained, _CONTEXT), concurrency=_CONCURRENCY)


def _report(file: TaskFile, results: Sequence[ItemResult]) -> TaskReport:
    estimates = {metric: mean([result.metrics[metric] for result in results]) for metric in results[0].metrics}
    task = file.task(file.options)
    accuracy = estimates[task.headline]
    return TaskReport(
        file.name,
        accuracy.value,
        len(results),
        accuracy.stderr,
        file.kind,
        task.headline,
        task.num_shots,
        {metric: {"value": each.value, "stderr": each.stderr} for metric, each in estimates.items()},
        task.summary(results),
    )
