"""MMLU: four answers under the letters A to D, after five questions of the same subject with their answers.

The examples come from the items of --shots (the benchmark's dev file); without them there are none, as the report says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tokenmill.engine.llm import LLM
from tokenmill.evaluate.likelihood import Progress
from tokenmill.evaluate.statistics import mean
from tokenmill.evaluate.tasks.base import Fields, Item, ItemResult, Task, choice_defect
from tokenmill.evaluate.tasks.choices import Question, pick, score_answers

_LETTERS = "ABCDEFGHIJ"


class Mmlu(Task):
    fields: ClassVar[Fields] = {"subject": str, "q": str, "choices": list, "answer": int}
    headline = "acc"
    takes_shots = True
    default_num_shots = 5

    @classmethod
    def defect(cls, item: Item) -> str | None:
        if len(item["choices"]) > len(_LETTERS):
            return f"'choices' are more than {len(_LETTERS)}"
        return choice_defect(item, "choices", "answer")

    @property
    def num_shots(self) -> int:
        return super().num_shots if self.options.shots else 0

    def run(self, llm: LLM, items: Sequence[Item], on_progress: Progress) -> list[ItemResult]:
        questions = [
            Question(self._prompt(item), [f" {letter}" for letter in _LETTERS[: len(item["choices"])]])
            for item in items
        ]
        results = []
        for item, scores in zip(items, score_answers(llm, questions, on_progress), strict=True):
            picked = pick(scores)
            details = {"subject": item["subject"], "gold": item["answer"], "picked": picked}
            results.append(ItemResult({"acc": float(picked == item["answer"])}, details))
        return results

    def summary(self, results: Sequence[ItemResult]) -> dict[str, float]:
        """The mean over subjects, each counted once, beside the mean over questions."""
        subjects: dict[str, list[float]] = {}
        for result in results:
            subjects.setdefault(result.details["subject"], []).append(result.metrics["acc"])
        return {
            "subjects": len(subjects),
            "acc_by_subject": mean([mean(each).value for each in subjects.values()]).value,
        }

    def _prompt(self, item: Item) -> str:
        subject = item["subject"]
        shots = [shot for shot in self.options.shots if shot["subject"] == subject][: self.num_shots]
        opening = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
        examples = [f"{_asked(shot)} {_LETTERS[shot['answer']]}\n\n" for shot in shots]
        return opening + "".join(examples) + _asked(item)


def _asked(item: Item) -> str:
    lines = [f"{letter}. {choice}" for letter, choice in zip(_LETTERS, item["choices"], strict=False)]
    return "\n".join([item["q"].strip(), *lines, "Answer:"])
