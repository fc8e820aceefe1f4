"""An engine for one terminal: streams one answer at a time, and Ctrl-C ends the answer but not the engine.

The engine thread never sees the interrupt, so no step is cut short. Used by `run` and `chat`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenmill.cli.render.units import count, counted, milliseconds, tokens_per_second
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.types import SamplingParams

if TYPE_CHECKING:
    from tokenmill.engine.intake import Prompt
    from tokenmill.engine.outputs import CompletionOutput, RequestOutput


@dataclass(slots=True)
class Answer:
    output: RequestOutput | None  # None: interrupted before the first token
    interrupted: bool


class Streamer:
    def __init__(self, model: str, engine: EngineConfig) -> None:
        from tokenmill.engine.async_engine import AsyncEngine

        self.engine = AsyncEngine(model, engine)
        self.engine.parts.use_only_adapter()
        # One loop for all answers: the engine thread may still deliver to it just after an interrupt.
        self._runner = asyncio.Runner()

    @property
    def has_template(self) -> bool:
        return self.engine.parts.chat_template is not None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation as the model's chat template writes it."""
        template = self.engine.parts.chat_template
        if template is None:
            name = self.engine.parts.path.name
            raise UserError(f"{name} has no chat template: it is a base model", "use `tokenmill run --raw`")
        text: str = template.render(list(messages))
        return text

    def stream(self, prompt: Prompt, params: SamplingParams, chat: bool, on_text: Callable[[int, str], None]) -> Answer:
        """Generate; `on_text` gets (which of the n answers, new text). Returns what there is when it ends."""
        answer = Answer(None, False)

        async def follow() -> None:
            async with contextlib.aclosing(self.engine.generate(prompt, params, chat=chat)) as updates:  # type: ignore[type-var]
                async for update in updates:
                    answer.output = update.output
                    if update.text:
                        on_text(update.index, update.text)

        try:
            self._runner.run(follow())
        except KeyboardInterrupt:
            answer.interrupted = True
        return answer

    def close(self) -> None:
        self.engine.close()
        self._runner.close()

    def __enter__(self) -> Streamer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def answer_record(output: RequestOutput, num_logprobs: int | None = None) -> dict[str, Any]:
    """The JSON of an answer; with n > 1 the first one's, and all of them under "choices"."""
    first = output.outputs[0]
    ttft, tpot = output.metrics.ttft, output.metrics.tpot(len(first.token_ids))
    record = {
        "text": first.text,
        "token_ids": first.token_ids,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(len(each.token_ids) for each in output.outputs),
        "ttft_ms": None if ttft is None else round(ttft * 1000, 3),
        "tpot_ms": None if tpot is None else round(tpot * 1000, 3),
        "finish_reason": first.finish_reason,
        "cached_tokens": output.num_cached_tokens,
    }
    if num_logprobs is not None:
        record["logprobs"] = logprob_records(first, num_logprobs)
    if len(output.outputs) > 1:
        record["choices"] = [_choice(each, num_logprobs) for each in output.outputs]
    return record


def answer_footer(record: Mapping[str, Any], interrupted: bool = False) -> str:
    """One line about an answer: 57 tokens, 83.9 tok/s, first after 56.2 ms, stop."""
    speed = f", {tokens_per_second(1000 / record['tpot_ms'])}" if record["tpot_ms"] else ""
    cached = f" ({count(record['cached_tokens'])} cached)" if record["cached_tokens"] else ""
    prompt = f"prompt {counted(record['prompt_tokens'], 'token')}{cached}"
    end = "interrupted" if interrupted else record["finish_reason"]
    first = f"first after {milliseconds(record['ttft_ms'])}"
    return f"[{counted(record['completion_tokens'], 'token')}{speed}, {first}, {prompt}, {end}]"


def logprob_records(completion: CompletionOutput, count: int) -> list[dict[str, Any]]:
    return [
        {
            "token_id": token_id,
            "logprob": entries[token_id].logprob,
            # the k most likely come first; the sampled one follows if it is not among them
            "top": [[each, entry.logprob] for each, entry in list(entries.items())[:count]],
        }
        for token_id, entries in zip(completion.token_ids, completion.logprobs or [], strict=True)
    ]


def _choice(completion: CompletionOutput, num_logprobs: int | None) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
    }
    if num_logprobs is not None:
        choice["logprobs"] = logprob_records(completion, num_logprobs)
    return choice
