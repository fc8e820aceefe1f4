"""The context a benchmark gives its engine: that of its longest request, or an error that says which length to lower.

Called before the engine is built, so that no request is silently truncated.
"""

from __future__ import annotations

from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.sources import resolve
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError


def benchmark_context(model: str, config: EngineConfig, needed: int) -> int:
    """`needed`: tokens of the longest request, prompt and output."""
    if config.context:
        limit, whose = config.context, "--context allows"
    else:
        limit, whose = open_checkpoint(resolve(model).path).description.context_length, "the model was trained for"
    if needed > limit:
        raise UserError(
            f"the longest request has {needed} tokens, more than the {limit} that {whose}",
            "lower --input-len or --output-len",
        )
    return config.context or needed
