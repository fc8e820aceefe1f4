"""Answers that the model writes: prompts in, texts out, greedy, a batch at a time so that progress can be seen.

Called by the tasks that judge a text. Knows nothing about what is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.engine.llm import LLM
from tokenmill.evaluate.likelihood import Progress
from tokenmill.types import SamplingParams

_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    num_tokens: int
    finished: bool  # False: cut at the token limit


def write_answers(
    llm: LLM, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str], chat: bool, on_progress: Progress
) -> list[Answer]:
    """With `chat` each prompt is a user's message, in the model's template."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=tuple(stop))
    answers: list[Answer] = []
    for begin in range(0, len(prompts), _AT_ONCE):
        batch = prompts[begin : begin + _AT_ONCE]
        if chat:
            outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in batch], params)
        else:
            outputs = llm.generate(batch, params)
        for output in outputs:
            only = output.outputs[0]
            answers.append(Answer(only.text, len(only.token_ids), only.finish_reason != "length"))
        on_progress(len(answers), len(prompts))
    return answers
