"""Facts about rows of a step that both the runner and the executors use. No torch."""

from __future__ import annotations

from tokenmill.types import ScheduledTokens


def num_prompt_logits(row: ScheduledTokens) -> int:
    """How many leading tokens of the row need logits for prompt log-probabilities: each
    predicts the prompt token after it, so the last prompt token needs none."""
    if row.request.params.prompt_logprobs is None:
        return 0
    return max(0, min(row.count, len(row.request.prompt_ids) - 1 - row.start))
