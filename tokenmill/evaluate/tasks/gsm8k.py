"""GSM8K: word problems, solved in writing; right if the number after `####` (strict) or the last one (flexible) is.

Five worked examples come first, our own; with --shots they are taken from that file instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from tokenmill.engine.llm import LLM
from tokenmill.evaluate.likelihood import Progress
from tokenmill.evaluate.tasks.base import Fields, Item, ItemResult, Task
from tokenmill.evaluate.tasks.generation import write_answers

_MAX_TOKENS = 256
_STRICT = re.compile(r"####\s*\$?(-?[\d.,]*\d)")
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")

_EXAMPLES: tuple[Item, ...] = (
    {
        "question": "A shelf holds 4 boxes with 12 pencils each. A teacher takes 15 pencils. How many are left?",
        "answer": "The boxes hold 4 * 12 = 48 pencils.\nAfter the teacher takes 15 there are 48 - 15 = 33.\n#### 33",
    },
    {
        "question": "Mara runs 3 miles on each weekday and 5 miles on each day of the weekend. How far does she run in "
        "two weeks?",
        "answer": "On weekdays she runs 5 * 3 = 15 miles a week.\nOn weekends she runs 2 * 5 = 10 miles a week.\n"
        "In one week that is 15 + 10 = 25 miles.\nIn two weeks it is 2 * 25 = 50 miles.\n#### 50",
    },
    {
        "question": "A coat costs $80 and is sold at 25% off. Tom pays with a $100 bill. How much change does he get?",
        "answer": "The discount is 80 * 25 / 100 = $20.\nThe coat costs 80 - 20 = $60.\n"
        "Tom gets 100 - 60 = $40 back.\n#### 40",
    },
    {
        "question": "Lena is twice as old as Ben. In 6 years Ben will be 15. How old is Lena now?",
        "answer": "Ben is 15 - 6 = 9 years old now.\nLena is 2 * 9 = 18 years old.\n#### 18",
    },
    {
        "question": "A baker makes 240 rolls. Half are sold in the morning and a third of the rest at noon. How many "
        "remain?",
        "answer": "In the morning 240 / 2 = 120 rolls are sold, so 120 remain.\nAt noon 120 / 3 = 40 are sold.\n"
        "There remain 120 - 40 = 80 rolls.\n#### 80",
    },
)


class Gsm8k(Task):
    fields: ClassVar[Fields] = {"question": str, "answer": str}
    headline = "strict"
    takes_shots = True
    generates = True
    default_num_shots = len(_EXAMPLES)

    @classmethod
    def defect(cls, item: Item) -> str | None:
        return None if strict_number(item["answer"]) is not None else "'answer' has no number after ####"

    def run(self, llm: LLM, items: Sequence[Item], on_progress: Progress) -> list[ItemResult]:
        shots = (self.options.shots or _EXAMPLES)[: self.num_shots]
        opening = "".join(f"Question: {shot['question']}\nAnswer: {shot['answer']}\n\n" for shot in shots)
        answers = write_answers(
            llm,
            [f"{opening}Question: {item['question']}\nAnswer:" for item in items],
            max_tokens=self.options.max_tokens or _MAX_TOKENS,
            stop=("Question:",),
            chat=bool(self.options.chat),
            on_progress=on_progress,
        )
        results = []
        for item, answer in zip(items, answers, strict=True):
            gold, strict, last = strict_number(item["answer"]), strict_number(answer.text), last_number(answer.text)
            metrics = {"strict": float(strict == gold), "flexible": float(last == gold)}
            details = {
                "text": answer.text,
                "gold": gold,
                "strict": strict,
                "flexible": last,
                "cut": not answer.finished,
            }
            results.append(ItemResult(metrics, details))
        return results


def strict_number(text: str) -> float | None:
    """The number after the first `####`."""
    match = _STRICT.search(text)
    return _value(match[1]) if match else None


def last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return _value(numbers[-1]) if numbers else None


def _value(text: str) -> float | None:
    """12, 1,200, $3.50, -4 -> a number; None for what only looks like one."""
    try:
        return float(text.replace(",", "").replace("$", ""))
    except ValueError:
        return None
