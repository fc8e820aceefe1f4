"""Questions with written-out answers: ARC, PIQA and any file with query, choices and gold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tokenmill.engine.llm import LLM
from tokenmill.evaluate.likelihood import Progress
from tokenmill.evaluate.tasks.base import Fields, Item, ItemResult, Task, choice_defect
from tokenmill.evaluate.tasks.choices import Question, choice_metrics, score_answers


class MultipleChoice(Task):
    fields: ClassVar[Fields] = {"query": str, "choices": list, "gold": int}
    headline = "acc_norm"

    @classmethod
    def defect(cls, item: Item) -> str | None:
        return choice_defect(item, "choices", "gold")

    def run(self, llm: LLM, items: Sequence[Item], on_progress: Progress) -> list[ItemResult]:
        questions = [
            Question(f"{item['query'].strip()}\nAnswer:", [f" {choice}" for choice in item["choices"]])
            for item in items
        ]
        scored = score_answers(llm, questions, on_progress)
        return [
            ItemResult(*choice_metrics(scores, question.answers, item["gold"]))
            for scores, question, item in zip(scored, questions, items, strict=True)
        ]
