"""The contract of a task: which items it takes, how a model answers them, how answers are judged.

A task is recognized by the fields of its items, never by a file name. It turns all items into results; means and error
bars are made from their metrics. Choices are scored by choices.py, texts made by generation.py; a task file says only
what is asked and how an answer is judged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tokenmill.engine.llm import LLM
from tokenmill.evaluate.likelihood import Progress

Item = Mapping[str, Any]
Fields = Mapping[str, type]


@dataclass(frozen=True, slots=True)
class ItemResult:
    metrics: Mapping[str, float]  # 0 to 1 each; the same names for every item of a task
    details: Mapping[str, Any] = field(default_factory=dict)  # what was answered; plain values, for --out


@dataclass(frozen=True, slots=True)
class TaskOptions:
    shots: Sequence[Item] = ()  # items to take examples from, for tasks that can
    num_shots: int | None = None  # None: the task's usual number
    chat: bool | None = None  # put prompts into the chat template; None: as the task usually does
    max_tokens: int = 0  # of an answer; 0: the task's usual number
    unsafe_code: bool = False  # run programs of the model even where they cannot be confined


class Task(ABC):
    """One instance serves one run."""

    fields: ClassVar[Fields]  # what an item must have
    headline: ClassVar[str]  # the metric reported as accuracy
    takes_shots: ClassVar[bool] = False  # can use the items of --shots
    generates: ClassVar[bool] = False  # --chat and --max-tokens mean something
    default_num_shots: ClassVar[int] = 0

    def __init__(self, options: TaskOptions) -> None:
        self.options = options

    @classmethod
    def defect(cls, item: Item) -> str | None:
        """What is wrong with an item that has all fields."""
        del item
        return None

    @abstractmethod
    def run(self, llm: LLM, items: Sequence[Item], on_progress: Progress) -> list[ItemResult]:
        """One result per item, in order."""

    def summary(self, results: Sequence[ItemResult]) -> dict[str, float]:
        """Figures of the whole that are no mean of metrics."""
        del results
        return {}

    @property
    def num_shots(self) -> int:
        return self.default_num_shots if self.options.num_shots is None else self.options.num_shots


def choice_defect(item: Item, choices: str, gold: str) -> str | None:
    texts, index = item[choices], item[gold]
    if len(texts) < 2 or not all(isinstance(text, str) and text for text in texts):
        return f"'{choices}' must be two texts or more"
    if not 0 <= index < len(texts):
        return f"'{gold}' is {index}, there are {len(texts)} choices"
    return None
