"""IFEval: prompts with instructions that a program can check; right if all of a prompt's instructions are followed.

Loose judging also accepts the answer without its first or last line and without asterisks, as the benchmark defines it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tokenmill.engine.llm import LLM
from tokenmill.evaluate.instructions import INSTRUCTIONS, follows
from tokenmill.evaluate.likelihood import Progress
from tokenmill.evaluate.tasks.base import Fields, Item, ItemResult, Task
from tokenmill.evaluate.tasks.generation import write_answers

_MAX_TOKENS = 1280


class IfEval(Task):
    fields: ClassVar[Fields] = {"prompt": str, "instruction_id_list": list, "kwargs": list}
    headline = "prompt_strict"
    generates = True

    @classmethod
    def defect(cls, item: Item) -> str | None:
        names, arguments = item["instruction_id_list"], item["kwargs"]
        if not names or len(names) != len(arguments) or not all(isinstance(each, dict) for each in arguments):
            return "'instruction_id_list' and 'kwargs' must be of one length, a mapping for each instruction"
        unknown = [name for name in names if name not in INSTRUCTIONS]
        return f"the instruction '{unknown[0]}' is not known" if unknown else None

    def run(self, llm: LLM, items: Sequence[Item], on_progress: Progress) -> list[ItemResult]:
        chat = llm.parts.chat_template is not None if self.options.chat is None else self.options.chat
        answers = write_answers(
            llm,
            [item["prompt"] for item in items],
            max_tokens=self.options.max_tokens or _MAX_TOKENS,
            stop=(),
            chat=chat,
            on_progress=on_progress,
        )
        return [
            ItemResult(*judge(item, answer.text, answer.finished)) for item, answer in zip(items, answers, strict=True)
        ]

    def summary(self, results: Sequence[ItemResult]) -> dict[str, float]:
        """Over instructions instead of prompts."""
        totals = sum(len(result.details["strict"]) for result in results)
        return {
            f"instruction_{mode}": sum(sum(result.details[mode]) for result in results) / totals
            for mode in ("strict", "loose")
        }


def judge(item: Item, text: str, finished: bool = True) -> tuple[dict[str, float], dict[str, object]]:
    """(metrics, details): the details have one verdict per instruction."""
    pairs = list(zip(item["instruction_id_list"], item["kwargs"], strict=True))
    strict = [follows(name, text, arguments) for name, arguments in pairs]
    variants = loose_variants(text)
    loose = [any(follows(name, variant, arguments) for variant in variants) for name, arguments in pairs]
    metrics = {"prompt_strict": float(all(strict)), "prompt_loose": float(all(loose))}
    names = [name for name, _ in pairs]
    return metrics, {"instructions": names, "strict": strict, "loose": loose, "text": text, "cut": not finished}


def loose_variants(text: str) -> list[str]:
    lines = text.split("\n")
    cut = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*cut, *(variant.replace("*", "") for variant in cut)]
