"""HumanEval: the body of a function from its signature and docstring; right if its tests pass, from another process."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

from tokenmill.engine.llm import LLM
from tokenmill.evaluate.likelihood import Progress
from tokenmill.evaluate.sandbox import Verdict, check_function, require_confinement
from tokenmill.evaluate.tasks.base import Fields, Item, ItemResult, Task
from tokenmill.evaluate.tasks.generation import write_answers

_MAX_TOKENS = 512
_STOP = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\nassert ")  # the function is over
_REQUEST = "Complete this function. Answer with the whole function in one code block."
_PROGRAMS_AT_ONCE = 2


class HumanEval(Task):
    fields: ClassVar[Fields] = {"task_id": str, "prompt": str, "entry_point": str, "test": str}
    headline = "pass@1"
    generates = True

    @classmethod
    def defect(cls, item: Item) -> str | None:
        return None if item["entry_point"].isidentifier() else "'entry_point' is not the name of a function"

    def run(self, llm: LLM, items: Sequence[Item], on_progress: Progress) -> list[ItemResult]:
        """As a completion of the prompt, or with --chat as an answer that holds the whole function."""
        chat, unsafe = bool(self.options.chat), self.options.unsafe_code
        if not unsafe:
            require_confinement()  # before the model has written anything
        answers = write_answers(
            llm,
            [f"{_REQUEST}\n```python\n{item['prompt']}```" if chat else item["prompt"] for item in items],
            max_tokens=self.options.max_tokens or _MAX_TOKENS,
            stop=() if chat else _STOP,
            chat=chat,
            on_progress=on_progress,
        )
        with ThreadPoolExecutor(_PROGRAMS_AT_ONCE) as workers:
            texts = [answer.text for answer in answers]
            verdicts = workers.map(judge_completion, items, texts, [unsafe] * len(texts))
            return [
                ItemResult(
                    {"pass@1": float(verdict.passed)},
                    {"task_id": item["task_id"], "text": answer.text, "why": verdict.why},
                )
                for item, answer, verdict in zip(items, answers, verdicts, strict=True)
            ]


def judge_completion(item: Item, completion: str, unsafe: bool = False) -> Verdict:
    """A fenced block (of a chat answer) that holds the whole function is taken as it is."""
    fenced = _fenced(completion)
    body = fenced if fenced is not None and f"def {item['entry_point']}" in fenced else completion
    program = item["prompt"] + body if body is completion else f"{_imports(item['prompt'])}\n{body}"
    # The tests may use helpers that the prompt defines: it is complete without a body, for it ends with a docstring.
    setup = f"{item['prompt']}\n    pass\n"
    return check_function(program, setup, item["test"], item["entry_point"], unsafe=unsafe)


def _fenced(text: str) -> str | None:
    """What lies between the first ``` and the next, or the end."""
    _, opening, rest = text.partition("```")
    return rest.partition("```")[0].partition("\n")[2] if opening else None


def _imports(prompt: str) -> str:
    return "\n".join(line for line in prompt.splitlines() if line.startswith(("import ", "from ")))
