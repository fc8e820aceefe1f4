"""LAMBADA: the last word of a passage, right if every token of it is the model's first choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from tokenmill.engine.llm import LLM
from tokenmill.evaluate.likelihood import Progress
from tokenmill.evaluate.statistics import mean
from tokenmill.evaluate.tasks.base import Fields, Item, ItemResult, Task
from tokenmill.evaluate.tasks.choices import Question, score_answers


class Lambada(Task):
    fields: ClassVar[Fields] = {"context": str, "continuation": str}
    headline = "acc"

    @classmethod
    def defect(cls, item: Item) -> str | None:
        return None if item["continuation"].strip() else "'continuation' is empty"

    def run(self, llm: LLM, items: Sequence[Item], on_progress: Progress) -> list[ItemResult]:
        questions = [Question(item["context"], [f" {item['continuation'].strip()}"]) for item in items]
        return [
            ItemResult({"acc": float(score.greedy)}, {"logprob": score.logprob})
            for (score,) in score_answers(llm, questions, on_progress)
        ]

    def summary(self, results: Sequence[ItemResult]) -> dict[str, float]:
        return {"word_perplexity": math.exp(-mean([result.details["logprob"] for result in results]).value)}
