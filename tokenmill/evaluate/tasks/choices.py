"""Multiple choice: which continuation of a context the model finds most likely.

The answers of one question share its context, which is computed once. Tokens are cut as lm-evaluation-harness does: the
context alone and the whole are encoded, what the whole has more is the answer. Called by the multiple-choice tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.engine.llm import LLM
from tokenmill.errors import UserError
from tokenmill.evaluate.likelihood import Continuation, Progress, continuation_logprobs
from tokenmill.log import get_logger

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Question:
    context: str
    answers: Sequence[str]  # with the space that separates them from the context


def score_answers(llm: LLM, questions: Sequence[Question], on_progress: Progress) -> list[list[Continuation]]:
    """For each question, how likely each of its answers is."""
    tokenizer, context = llm.parts.tokenizer, llm.parts.config.context
    pairs, cut = [], 0
    for question in questions:
        for answer in question.answers:
            before, after = encode_pair(tokenizer, question.context, answer)
            room = context + 1 - len(after)  # the last token of an answer is never computed
            if room < 1:
                raise UserError(f"an answer has {len(after)} tokens, the context holds {context}", "raise --context")
            cut += len(before) > room
            pairs.append((before[-room:], after))
    if cut:
        _log.warning("%d of %d contexts are longer than %d tokens: their beginning is cut", cut, len(pairs), context)
    scores = iter(continuation_logprobs(llm.parts, pairs, on_progress))
    return [[next(scores) for _ in question.answers] for question in questions]


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Space between the two belongs to the continuation. An empty context becomes BOS, or EOS without one."""
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    joined = tokenizer.encode(stripped + continuation)
    before = tokenizer.encode(stripped)
    if not before:
        opening = tokenizer.bos_id if tokenizer.bos_id is not None else next(iter(tokenizer.eos_ids), None)
        if opening is None:
            raise UserError(
                "a context is empty and the model has neither a BOS nor an EOS token to put before it", "give a context"
            )
        return [opening], joined
    if len(joined) <= len(before):  # the continuation merges with the last token of the context
        return before[: len(joined) - 1], joined[len(joined) - 1 :]
    return joined[: len(before)], joined[len(before) :]


def pick(scores: Sequence[Continuation]) -> int:
    """The most likely answer; the first of equals."""
    return int(np.argmax([each.logprob for each in scores]))


def pick_by_length(scores: Sequence[Continuation], answers: Sequence[str]) -> int:
    """The answer with the most log-probability per character, its leading space not counted."""
    return int(np.argmax([each.logprob / len(text.lstrip()) for each, text in zip(scores, answers, strict=True)]))


def choice_metrics(
    scores: Sequence[Continuation], answers: Sequence[str], gold: int
) -> tuple[dict[str, float], dict[str, object]]:
    """(metrics acc and acc_norm, details)"""
    plain, by_length = pick(scores), pick_by_length(scores, answers)
    metrics = {"acc": float(plain == gold), "acc_norm": float(by_length == gold)}
    return metrics, {"gold": gold, "picked": plain, "picked_norm": by_length, "logprobs": [x.logprob for x in scores]}
