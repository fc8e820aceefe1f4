"""A request body -> SamplingParams, within the server's limits. Every error names the field.

Shared by completions, chat and the adapters. Knows nothing of prompts beyond their length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.errors import UserError
from tokenmill.serve.api.protocol import MAX_STOPS, GenerationBody
from tokenmill.serve.api.structured import constrain
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.errors import ApiError, context_exceeded
from tokenmill.types import CacheControl, SamplingParams

_SAME_NAME = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "allowed_token_ids",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
)
_MAX_STOP_CHARS = 1024
_MAX_BAD_WORDS, _MAX_BAD_CHARS = 256, 4096


def build_params(
    body: GenerationBody,
    config: ServeConfig,
    max_tokens: int,
    defaults: Mapping[str, Any] | None = None,
    **fixed: Any,
) -> SamplingParams:
    """`max_tokens` is resolved by the caller; `defaults` are the server's, for what the body leaves open; `fixed` are
    fields that the route decides (log-probabilities)."""
    values: dict[str, Any] = dict(defaults or {})
    values |= {name: getattr(body, name) for name in _SAME_NAME if getattr(body, name) is not None}
    values |= {name: value for name, value in fixed.items() if value is not None}
    if body.use_beam_search:
        raise ApiError(
            400, "use_beam_search is part of /v1/completions only: ask there, or use n", param="use_beam_search"
        )
    _check_limit("n", values.get("n"), config.max_n)
    _check_limit("logprobs", values.get("logprobs"), config.max_logprobs)
    _check_limit("prompt_logprobs", values.get("prompt_logprobs"), config.max_logprobs)
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs is not part of streams: leave it or stream out", param="prompt_logprobs")
    if body.seed is not None:
        if not -(2**63) <= body.seed < 2**64:
            raise ApiError(400, "seed is out of range: give a 64-bit number", param="seed")
        values["seed"] = body.seed % 2**64
    values["stop"] = _stops(body.stop)
    values["logit_bias"] = _biases(body.logit_bias)
    values["bad_words"] = _bad_words(body.bad_words)
    values["cache"] = _cache(body)
    try:
        params = SamplingParams(max_tokens=max_tokens, **values)
        wanted = body.structured()
    except UserError as error:
        raise ApiError(400, str(error), param=error.problem.split(" ")[0]) from None
    except ValueError as error:
        raise ApiError(400, str(error), param="response_format") from None
    return params if wanted is None else constrain(params, wanted)


def resolve_max_tokens(body: GenerationBody, prompt_length: int, context: int, default: int | None) -> int:
    """The body's value, else `default`, else what fits the context. Too large a value is rejected, not clamped."""
    room = context - prompt_length
    wanted = body.output_limit()
    if wanted is None:
        return max(1, room if default is None else min(default, room))
    if wanted < 0:
        raise ApiError(400, f"max_tokens is {wanted}: give at least 1", param="max_tokens")
    if wanted > room and prompt_length < context:
        raise context_exceeded(
            f"max_tokens is {wanted}, but after the prompt of {prompt_length} tokens the context of {context} has room "
            f"for {room}: lower max_tokens, shorten the prompt or serve with a larger --context.",
            context,
            "max_tokens",
        )
    return max(1, wanted)


def resolve_truncation(wanted: int | None, max_tokens: int | None, context: int) -> int | None:
    """How many tokens of a prompt are kept, the last ones; None: all. -1: as many as leave room for the output."""
    if wanted is None:
        return None
    if wanted == 0 or wanted > context:
        problem = f"truncate_prompt_tokens is {wanted}: give 1 to {context}, or -1 for what fits"
        raise ApiError(400, problem, param="truncate_prompt_tokens")
    return wanted if wanted > 0 else max(1, context - max(1, max_tokens or 1))


def _bad_words(words: list[str] | None) -> tuple[str, ...]:
    words = words or []
    if len(words) > _MAX_BAD_WORDS or sum(map(len, words)) > _MAX_BAD_CHARS:
        problem = f"give at most {_MAX_BAD_WORDS} bad_words of {_MAX_BAD_CHARS} characters in all"
        raise ApiError(400, problem, param="bad_words")
    return tuple(words)


def _cache(body: GenerationBody) -> CacheControl | None:
    """The KV cache settings of the body."""
    control, policy, budget = body.cache_control, body.kv_policy or "", body.kv_budget or 0
    if control is None and not policy and not budget:
        return None
    try:
        ttl = control.seconds() if control is not None else 0.0
        if control is not None and control.type == "ephemeral" and not ttl:
            raise ValueError("cache_control ttl is 0: give at least 1 second")
        return CacheControl(ttl, control is not None and control.type == "pin", policy, budget)
    except UserError as error:
        raise ApiError(400, str(error), param=error.problem.split(" ")[0]) from None
    except ValueError as error:
        raise ApiError(400, str(error), param="cache_control") from None


def _check_limit(name: str, value: int | None, limit: int) -> None:
    if value is not None and value > limit:
        raise ApiError(400, f"{name} is {value}, this server allows {limit}", param=name)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or any(len(each) > _MAX_STOP_CHARS for each in stops):
        raise ApiError(400, f"give at most {MAX_STOPS} stop strings of {_MAX_STOP_CHARS} characters", param="stop")
    return stops


def _biases(biases: dict[str, float] | None) -> dict[int, float] | None:
    if biases is None:
        return None
    if not all(each.isascii() and each.isdecimal() and len(each) < 12 for each in biases):
        raise ApiError(400, "logit_bias keys must be token ids", param="logit_bias")
    return {int(token_id): bias for token_id, bias in biases.items()}
