"""What outputs with and without drafts are compared by."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.engine.outputs import RequestOutput


def summary(outputs: list[RequestOutput]) -> list[Any]:
    """All that a caller sees, log-probabilities up to rounding."""
    return [
        (
            each.token_ids,
            each.text,
            each.finish_reason,
            each.stop_reason,
            [
                {token: pytest.approx(entry.logprob, abs=1e-3) for token, entry in row.items()}
                for row in each.logprobs or ()
            ],
        )
        for output in outputs
        for each in output.outputs
    ]
