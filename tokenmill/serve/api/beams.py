"""`use_beam_search` of /v1/completions: the `n` most probable answers of each prompt, found step by step.

Every step is a request of one token for each beam, which the engine schedules, caches and meters like any other. What a
beam search cannot honour is refused by name. Called by the completions route.
"""

from __future__ import annotations

from typing import Any

from tokenmill.engine.beam_search import BeamSearchParams, BeamSequence, beam_steps
from tokenmill.errors import UserError
from tokenmill.serve.api.exchange import Record
from tokenmill.serve.api.protocol import CompletionBody
from tokenmill.serve.api.sampling import resolve_max_tokens
from tokenmill.serve.callers import Caller
from tokenmill.serve.errors import ApiError
from tokenmill.serve.generation import Generation
from tokenmill.serve.service import Service

# What would change the answer and has no meaning here; sampling itself has none either, and is not looked at.
_REFUSED = (
    *("stream", "echo", "logprobs", "prompt_logprobs", "stop", "stop_token_ids", "min_tokens", "best_of"),
    *("bad_words", "allowed_token_ids", "logit_bias", "presence_penalty", "frequency_penalty", "resume_token_ids"),
    *("return_timeline", "return_prefix_break", "truncate_prompt_tokens"),
)


async def beam_answer(
    service: Service,
    body: CompletionBody,
    prompts: list[str | list[int]],
    caller: Caller,
    record: Record,
    default_max_tokens: int,
) -> dict[str, Any]:
    """`choices` and `usage`."""
    wrong = next((name for name in _REFUSED if getattr(body, name)), None)
    if wrong is not None or body.structured() is not None:
        named = wrong or "structured output"
        raise ApiError(400, f"{named} does not go with use_beam_search: leave one of them out", param=wrong)
    service.require_text()
    encoded = await service.encode(prompts, client=caller.client, special=body.add_special_tokens is not False)
    limits = [resolve_max_tokens(body, len(ids), service.context, default_max_tokens) for ids in encoded]
    width = body.n or 1
    if not 1 <= width <= service.config.max_n:
        raise ApiError(400, f"n is {width}, this server allows {service.config.max_n}", param="n")
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    try:
        params = BeamSearchParams(width, min(limits), bool(body.ignore_eos), penalty)
    except UserError as error:
        raise ApiError(400, str(error), param="n") from None
    search = _Search(service, caller)
    beams = await search.run(encoded, params)
    choices = [_choice(service, body, each) for own in beams for each in own]
    for number, choice in enumerate(choices):
        choice["index"] = number
    record.prompt_tokens = sum(map(len, encoded))
    record.completion_tokens = sum(len(each.token_ids) for own in beams for each in own)
    record.cached_tokens = search.num_cached
    usage: dict[str, Any] = {
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "total_tokens": record.prompt_tokens + record.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": search.num_cached},
    }
    return {"choices": choices, "usage": usage if search.cost is None else usage | {"cost": round(search.cost, 12)}}


class _Search:
    """Drives the steps of one search; adds up what they cost."""

    def __init__(self, service: Service, caller: Caller) -> None:
        self._service = service
        self._caller = caller
        self.cost: float | None = None  # dollars; None where nothing has a price
        self.num_cached = 0  # tokens of the prompts, in the first step

    async def run(self, prompts: list[list[int]], params: BeamSearchParams) -> list[list[BeamSequence]]:
        service = self._service
        steps = beam_steps(prompts, params, service.identity.eos_ids, service.identity.vocab_size)
        try:
            asked, step = next(steps)
            while True:
                generation = await service.open(asked, lambda _: step, self._caller, streaming=False)  # noqa: B023
                try:
                    outputs = await generation.result()
                finally:
                    generation.close()
                self._count(generation, first=asked == prompts)
                asked, step = steps.send(outputs)
        except StopIteration as ended:
            found: list[list[BeamSequence]] = ended.value
            return found

    def _count(self, generation: Generation, first: bool) -> None:
        if first:
            self.num_cached = sum(output.num_cached_tokens for output in generation.outputs)
        if generation.cost is not None:
            self.cost = (self.cost or 0.0) + generation.cost


def _choice(service: Service, body: CompletionBody, beam: BeamSequence) -> dict[str, Any]:
    ended = beam.finish_reason == "stop"
    shown = beam.token_ids[:-1] if ended else beam.token_ids  # the end-of-text token is no text
    choice: dict[str, Any] = {
        "index": 0,
        "text": service.tokenizer.decode(shown),
        "logprobs": None,
        "finish_reason": beam.finish_reason,
        "stop_reason": None,
        "cumulative_logprob": beam.cumulative_logprob,
    }
    return choice | ({"token_ids": beam.token_ids} if body.return_token_ids else {})
