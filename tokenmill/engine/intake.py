"""Prompts -> Requests: text or token ids are checked against the model before anything is scheduled.

Everything a caller can get wrong about a single request is refused here, with the remedy. Used by LLM, AsyncEngine and
the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Protocol

from tokenmill.errors import UserError
from tokenmill.types import MAX_SEED, AdapterRef, CacheControl, Request, SamplingParams

Prompt = str | Sequence[int]
_CHUNK = 512  # tokens that are compared at once


class Encoding(Protocol):
    """What is needed of a tokenizer here."""

    reads_text: bool

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]: ...


class Intake:
    """Grammars of structured requests are compiled by the engine loop, which can wait for them."""

    def __init__(
        self,
        tokenizer: Encoding,
        vocab_size: int,
        eos_ids: Sequence[int],
        context_length: int,
        seed: int,
        budget: CacheControl | None = None,
        check: Callable[[SamplingParams], None] | None = None,
    ) -> None:
        """`budget`: the KV budget of requests that name none; `check` refuses what the engine's KV cache cannot do."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._context_length = context_length
        self._seed = seed
        self._budget = budget
        self._check = check
        self._arrivals = count()
        self._last: list[int] = []  # the last prompt of token ids, all checked
        self.adapter: AdapterRef | None = None  # of requests that name none
        self._last_words: tuple[tuple[str, ...], tuple[tuple[int, ...], ...]] = (), ()  # bad words and their tokens

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        chat: bool = False,
        embeds: bool = False,
    ) -> Request:
        """`chat`: the text is a rendered template, whose control tokens count and which brings its own BOS."""
        if isinstance(prompt, str):
            if not prompt:
                raise UserError("the prompt is empty", "give at least one character")
            ids = self._tokenizer.encode(prompt, add_special_tokens=not chat, parse_special=chat)
        else:
            ids = self._checked_prompt(prompt)
        if not ids:
            raise UserError("the prompt has no tokens", "give at least one")
        # Scoring and embedding may fill the context: the one token that they sample is never computed.
        scores_only = (embeds or params.prompt_logprobs is not None) and params.max_tokens == 1
        if len(ids) > self._context_length - (not scores_only):
            raise UserError(
                f"the prompt has {len(ids)} tokens, the context holds {self._context_length} with room for one more",
                "shorten the prompt or raise --context",
            )
        stop_ids = frozenset(self._checked_ids("stop token id", params.stop_token_ids))
        self._checked_ids("logit_bias token id", list(params.logit_bias or ()))
        self._checked_ids("allowed_token_ids token id", params.allowed_token_ids or ())
        if params.bad_words:
            own = dict.fromkeys((*params.bad_word_ids, *self._bad_word_ids(params.bad_words)))
            params = replace(params, bad_word_ids=tuple(own))
        structured = params.structured
        if structured is not None and not self._eos_ids:
            raise UserError("the model has no end-of-text token", "leave structured output out")
        if structured is not None and not self._tokenizer.reads_text:
            raise UserError("the model has no tokenizer to write text with", "leave structured output out")
        params = self._with_budget(params)
        if self._check is not None:
            self._check(params)
        arrival = next(self._arrivals)
        return Request(
            request_id=request_id if request_id is not None else str(arrival),
            prompt_ids=ids,
            params=params,
            # A grammar that is complete ends the request: there is nothing to go on with.
            stop_ids=stop_ids if params.ignore_eos and structured is None else stop_ids | self._eos_ids,
            seed=params.seed if params.seed is not None else self._own_seed(arrival),
            priority=priority,
            arrival=arrival,
            adapter=self.adapter,
            embeds=embeds,
        )

    def resume(self, request: Request, output_ids: Sequence[int]) -> None:
        """Have an answer go on after tokens that were computed elsewhere, as if they had been computed here."""
        ids, params = self._checked_ids("resume_token_ids token id", output_ids), request.params
        if params.n > 1 or params.prompt_logprobs is not None:
            raise UserError("resume_token_ids goes with one answer", "leave n, best_of and prompt_logprobs out")
        ended = len(ids) >= params.max_tokens or not request.stop_ids.isdisjoint(ids)
        if ended or request.num_tokens + len(ids) >= self._context_length:
            raise UserError("the answer of resume_token_ids has ended already", "leave resume_token_ids out")
        request.token_ids += ids

    def _bad_word_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Tokens of each word as it is written at the beginning of a text, and after a blank. All prompts of a request
        have the same words: they are encoded once."""
        known, ids = self._last_words
        if known != words:
            texts = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]
            encoded = [tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts]
            ids = tuple(dict.fromkeys(filter(None, encoded)))
            self._last_words = words, ids
        return ids

    def _with_budget(self, params: SamplingParams) -> SamplingParams:
        if self._budget is None or (params.cache is not None and params.cache.policy):
            return params
        own = params.cache or CacheControl()
        return replace(params, cache=replace(own, policy=self._budget.policy, budget=self._budget.budget))

    def _own_seed(self, arrival: int) -> int:
        """Different for every request, the same from run to run."""
        return (self._seed * 0x9E3779B97F4A7C15 + arrival * 0xD1B54A32D192ED03) & MAX_SEED

    def _checked_prompt(self, prompt: Sequence[int]) -> list[int]:
        """Prompts that begin alike come in bursts: what is as in the last one was checked with it, and taken from
        there. Several threads may ask at once, so `_last` is read once and replaced whole."""
        last, begin = self._last, 0
        while type(prompt) is list and begin < len(last):
            if prompt[begin : begin + _CHUNK] != last[begin : begin + _CHUNK]:
                break
            begin += _CHUNK
        begin = min(begin, len(last))
        ids = last[:begin] + self._checked_ids("prompt token id", prompt[begin:])
        self._last = ids
        return list(ids)

    def _checked_ids(self, what: str, ids: Sequence[int]) -> list[int]:
        if ids and set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self._vocab_size:
            return list(ids)  # long prompts: three passes in C
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise UserError(f"{what} {token_id!r} is not a whole number", "give token ids as integers")
            if not 0 <= token_id < self._vocab_size:
                raise UserError(f"{what} {token_id} is outside the vocabulary", f"give 0 to {self._vocab_size - 1}")
        return list(ids)


def cut_prompt(ids: list[int], max_tokens: int | None, bos_id: int | None) -> list[int]:
    """The end of a prompt; its first token stays if it is the one that starts every sequence. None: all of it."""
    if max_tokens is None or len(ids) <= max_tokens:
        return ids
    if max_tokens > 1 and ids[0] == bos_id:
        return [ids[0], *ids[1 - max_tokens :]]
    return ids[-max_tokens:]
