"""Reads the full logits of given tokens: the engine's loop with a runner that does not sample.

`read_logits` streams rows to a visitor, so that memory does not grow with the text. Several passages share a step, and
what they begin with in common is computed once (prefix cache). Under a KV budget of the engine, the tokens whose logits
are read count as generated, so that pages leave as they would while serving. Owns no engine: it borrows the parts of an
idle LLM. Called by the evaluators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tokenmill.engine.build import EngineParts
from tokenmill.engine.core import EngineCore
from tokenmill.engine.loop import EngineLoop
from tokenmill.errors import UserError
from tokenmill.runtime.scoring import LogitRunner
from tokenmill.types import CacheControl, Request, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

# (number of the passage, position of the first row's token, logits [R, vocabulary] float32: valid during the call).
# The row of position p predicts token p + 1. After a preemption rows come again, with the same values.
PassageVisitor = Callable[[int, int, "Tensor"], None]


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens to run through the model; the logits of those from `first` on are read."""

    token_ids: Sequence[int]
    first: int = 0


def read_logits(
    parts: EngineParts, passages: Sequence[Passage], visit: PassageVisitor, on_device: bool = False
) -> None:
    """Compute every passage once. Logits come on the CPU, or stay on the model's device."""
    assert not parts.core.has_work, "the engine is busy"
    requests = [_request(parts, passage, number) for number, passage in enumerate(passages)]
    numbers = {request.request_id: number for number, request in enumerate(requests)}

    def forward(request: Request, position: int, logits: Tensor) -> None:
        visit(numbers[request.request_id], position, logits)

    core = EngineCore(parts.core.scheduler, LogitRunner(parts.runtime.runner, forward, on_device))
    loop = EngineLoop(core, adapters=parts.adapters)
    try:
        for request in requests:
            loop.submit(request)
        loop.drain()
    except BaseException:
        for request in requests:  # interrupted or failed: the engine must be clean for the next call
            loop.cancel(request.request_id)
        raise


_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


def _request(parts: EngineParts, passage: Passage, number: int) -> Request:
    ids, context = list(passage.token_ids), parts.config.context
    if not 0 < len(ids) <= context:
        raise UserError(
            f"a passage has {len(ids)} tokens, the context holds {context}", "raise --context or shorten it"
        )
    assert 0 <= passage.first < len(ids)
    vocabulary = parts.description.vocab_size
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise UserError("a passage has token ids outside the vocabulary", f"give 0 to {vocabulary - 1}")
    policy, budget, adapter = parts.config.kv_budget_policy, parts.config.kv_budget, parts.intake.adapter
    if not policy:
        return Request(f"passage-{number}", ids, _PARAMS, arrival=number, logits_from=passage.first, adapter=adapter)
    return Request(
        f"passage-{number}",
        ids[: passage.first + 1],
        replace(_PARAMS, cache=CacheControl(policy=policy, budget=budget)),
        arrival=number,
        logits_from=passage.first,
        token_ids=ids,
        adapter=adapter,
    )
