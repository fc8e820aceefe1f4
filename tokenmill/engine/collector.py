"""TokenEvents -> RequestOutputs: adds text, finds stop strings, gathers log-probabilities and times.

Sits beside the tokenizer, outside the core, so that text never slows a step. A stop string is seen only here: the
caller is told to cancel the sequence, and tokens that arrive after it are dropped. Used by LLM and AsyncEngine alike.
"""

from __future__ import annotations

import time
from typing import Protocol

from tokenmill.engine.detokenizer import IncrementalDetokenizer
from tokenmill.engine.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestMetrics, RequestOutput
from tokenmill.errors import UserError
from tokenmill.types import Request, TokenEvent, TokenLogprobs


class Detokenizing(Protocol):
    """What is needed of a tokenizer here."""

    def token_bytes(self, token_id: int) -> bytes: ...


class RequestCollector:
    """Gathers the events of one request and its siblings."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Detokenizing) -> None:
        params = request.params
        self._params = params
        self._tokenizer = tokenizer
        self._stop_ids = request.stop_ids
        self._detokenizers = [
            IncrementalDetokenizer(tokenizer, params, request.prompt_ids)  # type: ignore[arg-type]
            for _ in range(params.n)
        ]
        completions = [
            CompletionOutput(index, logprobs=None if params.logprobs is None else []) for index in range(params.n)
        ]
        if params.logprobs is not None:
            for completion in completions:
                completion.cumulative_logprob = 0.0
        self.output = RequestOutput(
            request.request_id, prompt, request.prompt_ids, completions, RequestMetrics(time.perf_counter())
        )
        if params.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None]

    def replay(self, token_ids: list[int]) -> str:
        """Tokens that the only answer begins with, and that nobody waits for; returns their text as far as it was
        certain before the next one."""
        completion, detokenizer = self.output.outputs[0], self._detokenizers[0]
        text = "".join(detokenizer.push([token_id], False) for token_id in token_ids)
        if detokenizer.stop_reason is not None:
            raise UserError("the answer of resume_token_ids has ended already", "leave resume_token_ids out")
        completion.token_ids += token_ids
        completion.text += text
        return text

    def take(self, event: TokenEvent) -> tuple[str, bool]:
        """Add an event; returns (new text, True if a stop string ended this sequence and it must be cancelled)."""
        completion = self.output.outputs[event.index]
        if completion.finished:
            return "", False
        self._take_prompt(event)
        if event.token_ids:
            now = time.perf_counter()
            metrics = self.output.metrics
            metrics.first_token = metrics.first_token or now
            metrics.last_token = now
        detokenizer = self._detokenizers[event.index]
        visible = self._visible(event)
        delta = ""
        if len(visible) > 1:  # one by one: a stop string ends the output at the very token that completes it
            for number, token_id in enumerate(visible[:-1], start=1):
                delta += detokenizer.push([token_id], False)
                if detokenizer.stop_reason is not None:
                    del event.token_ids[number:], event.logprobs[number:]
                    break
            visible = visible[-1:]
        delta += detokenizer.push(visible, event.finish_reason is not None)
        completion.token_ids += event.token_ids
        self._take_logprobs(completion, event)
        completion.text += delta
        stopped = detokenizer.stop_reason is not None
        if stopped:
            completion.finish_reason, completion.stop_reason = "stop", detokenizer.stop_reason
        elif event.finish_reason is not None:
            completion.finish_reason, completion.stop_reason = event.finish_reason, event.stop_reason
        return delta, stopped and event.finish_reason is None

    def _visible(self, event: TokenEvent) -> list[int]:
        """The tokens that become text: the stop token does not, unless the caller asked to see it."""
        ended = event.finish_reason == "stop" and event.token_ids and event.token_ids[-1] in self._stop_ids
        if ended and not self._params.include_stop_str_in_output:
            return event.token_ids[:-1]
        return event.token_ids

    def _take_prompt(self, event: TokenEvent) -> None:
        output = self.output
        output.num_cached_tokens = max(output.num_cached_tokens, event.num_cached_tokens)
        if event.cache is not None:
            output.cache = output.cache or event.cache
            output.outputs[event.index].num_dropped_tokens = event.cache.num_dropped_tokens
        if output.prompt_logprobs is not None:
            output.prompt_logprobs += [self._position(each) for each in event.prompt_logprobs]

    def _take_logprobs(self, completion: CompletionOutput, event: TokenEvent) -> None:
        if completion.logprobs is None:
            return
        completion.logprobs += [self._position(each) for each in event.logprobs]
        completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + sum(
            each.logprob for each in event.logprobs
        )

    def _position(self, record: TokenLogprobs) -> PositionLogprobs:
        entries = {
            token_id: Logprob(logprob, rank + 1, self._text(token_id))
            for rank, (token_id, logprob) in enumerate(record.top)
        }
        if record.token_id not in entries:
            entries[record.token_id] = Logprob(record.logprob, record.rank, self._text(record.token_id))
        return entries

    def _text(self, token_id: int) -> str:
        """A token by itself, for people: a piece of a character shows as U+FFFD."""
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")
