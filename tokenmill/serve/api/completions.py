"""/v1/completions: one prompt or many, as text or token ids, answers complete or streamed.

Choice `index` counts answers over all prompts: prompt number times n plus the sibling's index.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from tokenmill.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from tokenmill.serve.api.beams import beam_answer
from tokenmill.serve.api.caller import caller_of
from tokenmill.serve.api.chat import finish_reason
from tokenmill.serve.api.exchange import event, json_response, record_of, respond, unless_gone
from tokenmill.serve.api.logprobs import CompletionLogprobs, LogprobBudget, prompt_scores
from tokenmill.serve.api.protocol import CompletionBody
from tokenmill.serve.api.reading import body_schema, check_prompts, read_body
from tokenmill.serve.api.requests import check_diagnosis, diagnosis_of
from tokenmill.serve.api.sampling import build_params, resolve_max_tokens, resolve_truncation
from tokenmill.serve.api.usage import StreamUsage, usage_of
from tokenmill.serve.errors import ApiError
from tokenmill.serve.generation import Delta, Generation
from tokenmill.serve.service import Service
from tokenmill.types import SamplingParams

_DEFAULT_MAX_TOKENS = 16


def add_completion_routes(app: FastAPI, service: Service) -> None:
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=body_schema(CompletionBody))
    async def completions(request: Request) -> Response:
        body = await read_body(request, service, CompletionBody)
        caller, record = caller_of(request, service, body), record_of(request)
        head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.check_model(body.model),
        }
        check_diagnosis(service, body)
        prompts = _checked_prompts(service, body)
        if body.use_beam_search:
            searching = beam_answer(service, body, prompts, caller, record, _DEFAULT_MAX_TOKENS)
            return json_response(head | await unless_gone(request, searching))
        budget = LogprobBudget(service.config.max_logprob_entries)

        def params(length: int) -> SamplingParams:
            limit = resolve_max_tokens(body, length, service.context, _DEFAULT_MAX_TOKENS)
            scored = body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs
            budget.spend(length, scored, body.n)
            logprobs = body.logprobs if body.logprobs is not None or not _ranks(body) else 0
            own = {"n": body.best_of, "logprobs": logprobs, "prompt_logprobs": scored}
            return build_params(body, service.config, limit, service.sampling_defaults.values, **own)

        opening = service.open(
            prompts,
            params,
            caller,
            streaming=bool(body.stream),
            special=body.add_special_tokens is not False,
            num_answers=body.best_of or body.n or 1,
            max_prompt_tokens=resolve_truncation(body.truncate_prompt_tokens, body.output_limit(), service.context),
        )
        generation = await unless_gone(request, opening)
        shapes = _Shapes(service, body, generation)

        def diagnose() -> dict[str, Any]:
            return diagnosis_of(service, body, generation, record)

        async def complete() -> dict[str, Any]:
            return head | {"choices": await shapes.choices(), "usage": usage_of(generation, record)} | diagnose()

        return await respond(
            request,
            generation,
            complete=complete,
            chunks=lambda: _chunks(generation, shapes, head, StreamUsage(body, generation, record, diagnose)),
        )

    app.include_router(router)


def _checked_prompts(service: Service, body: CompletionBody) -> list[str | list[int]]:
    if body.prompt_embeds is not None:
        raise ApiError(400, "prompt_embeds is not supported: send text or token ids", param="prompt_embeds")
    if body.suffix:
        raise ApiError(400, "suffix is not supported: this server does not fill in the middle", param="suffix")
    if body.best_of is not None and not (body.n or 1) <= body.best_of <= service.config.max_n:
        problem = f"best_of is {body.best_of}: give n or more, this server allows {service.config.max_n}"
        raise ApiError(400, problem, param="best_of")
    if _ranks(body) and body.stream:
        raise ApiError(
            400, "the best of several answers are known at their end: leave best_of or stream out", param="best_of"
        )
    if body.output_limit() == 0 and not body.echo:
        raise ApiError(400, "max_tokens is 0: give at least 1, or echo the prompt", param="max_tokens")
    return check_prompts(body.prompts(), service, "prompt", cut=body.truncate_prompt_tokens is not None)


def _ranks(body: CompletionBody) -> bool:
    """Whether more answers are made than returned."""
    return body.best_of is not None and body.best_of > (body.n or 1)


def _best(answers: list[CompletionOutput], count: int) -> list[CompletionOutput]:
    """Those with the highest mean log-probability of a token."""

    def mean(answer: CompletionOutput) -> float:
        return (answer.cumulative_logprob or 0.0) / max(1, len(answer.token_ids))

    return sorted(answers, key=mean, reverse=True)[:count] if len(answers) > count else answers


class _Shapes:
    """Answers as choices. An echoed prompt is the beginning of each of its answers."""

    def __init__(self, service: Service, body: CompletionBody, generation: Generation) -> None:
        self._tokenizer = service.tokenizer
        self._generation = generation
        self._num_answers = body.n or 1
        self._echo = bool(body.echo)
        self._mute = body.output_limit() == 0  # only the prompt was requested; the one sampled token is not shown
        self._num_logprobs = body.logprobs
        self._wants_scores = body.prompt_logprobs is not None
        self._wants_ids = bool(body.return_token_ids)
        self._logprobs: dict[tuple[int, int], CompletionLogprobs] = {}

    async def choices(self) -> list[dict[str, Any]]:
        shown = []
        for number, output in enumerate(self._generation.outputs):
            scores = await prompt_scores(output) if self._wants_scores else None
            for index, each in enumerate(_best(output.outputs, self._num_answers)):
                delta = Delta(number, index, each.text, each.token_ids, each.logprobs or [], each.finish_reason)
                choice = await self.choice(delta) | {"stop_reason": each.stop_reason}
                if scores is not None:
                    choice["prompt_logprobs"] = scores
                shown.append(choice)
        return shown

    async def choice(self, delta: Delta) -> dict[str, Any]:
        """A delta, or a complete answer as one delta. The first of each answer contains the echoed prompt."""
        output = self._generation.members[delta.number].output
        key = (delta.number, delta.index)
        first = key not in self._logprobs
        if first:
            shown = self._logprobs[key] = CompletionLogprobs(self._tokenizer, self._num_logprobs or 0)
            member = self._generation.members[delta.number]
            if member.num_resumed and self._generation.streaming:
                skipped = member.request.output_ids[: member.num_resumed]
                shown.skip(skipped if not self._echo else output.prompt_token_ids + skipped)
                first = False
        text, token_ids, positions = delta.text, delta.token_ids, list[PositionLogprobs | None](delta.logprobs)
        if self._mute:
            text, token_ids, positions = "", [], []
        if first and self._echo:
            text = self._prompt_text(output) + text
            token_ids = output.prompt_token_ids + token_ids
            positions = (output.prompt_logprobs or []) + positions
        logprobs = await self._logprobs[key].take(token_ids, positions) if self._num_logprobs is not None else None
        choice = {
            "index": delta.number * self._num_answers + delta.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": "length" if self._mute else finish_reason(delta.finish_reason),
        }
        if self._wants_ids:
            choice["token_ids"] = [] if self._mute else delta.token_ids
            if first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        return output.prompt if output.prompt is not None else self._tokenizer.decode(output.prompt_token_ids)


async def _chunks(
    generation: Generation, shapes: _Shapes, head: dict[str, Any], tail: StreamUsage
) -> AsyncIterator[bytes]:
    try:
        async for batch in generation.deltas():
            pieces = []
            for delta in batch:
                choice = await shapes.choice(delta)
                tail.count(delta)
                if choice["text"] or choice["logprobs"] or choice["finish_reason"] or choice.get("token_ids"):
                    pieces.append(event({**head, "choices": [choice], **tail.fields()}))
            if pieces:
                yield b"".join(pieces)
    except ApiError as error:
        yield tail.end(head, error)
    else:
        yield tail.end(head)
