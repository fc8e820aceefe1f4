"""Token counts of an answer as the OpenAI API reports them, and for the access log. Called by all generating routes."""

from __future__ import annotations

from typing import Any

from tokenmill.serve.exchange import Record
from tokenmill.serve.generation import Generation


def usage_of(generation: Generation, record: Record) -> dict[str, Any]:
    outputs = generation.outputs
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    completion = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    record.prompt_tokens, record.cached_tokens, record.completion_tokens = prompt, cached, completion
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
