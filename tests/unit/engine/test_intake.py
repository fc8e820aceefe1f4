"""Prompts become requests: the KV budget of those that name none, and what the engine cannot keep."""

from __future__ import annotations

import pytest

from tokenmill.engine.intake import Intake
from tokenmill.errors import UserError
from tokenmill.types import CacheControl, SamplingParams


class _NoTokenizer:
    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        raise AssertionError((text, add_special_tokens, parse_special))


def _intake(**fields: object) -> Intake:
    return Intake(_NoTokenizer(), 100, [2], 64, 0, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("own", "budget"),
    [
        (None, CacheControl(policy="h2o", budget=40)),
        (CacheControl(ttl=60), CacheControl(ttl=60, policy="h2o", budget=40)),
        (CacheControl(policy="full"), CacheControl(policy="full")),
        (CacheControl(policy="streaming_llm", budget=16), CacheControl(policy="streaming_llm", budget=16)),
    ],
    ids=str,
)
def test_a_request_that_names_no_budget_gets_the_default(own: CacheControl | None, budget: CacheControl) -> None:
    intake = _intake(budget=CacheControl(policy="h2o", budget=40))
    assert intake.request([1, 2], SamplingParams(cache=own)).params.cache == budget
    assert _intake().request([1, 2], SamplingParams(cache=own)).params.cache == own


def test_what_the_engine_cannot_keep_is_refused() -> None:
    def refuse(params: SamplingParams) -> None:
        if params.cache is not None:
            raise UserError("no", "never")

    intake = _intake(check=refuse)
    intake.request([1, 2], SamplingParams())
    with pytest.raises(UserError, match="no"):
        intake.request([1, 2], SamplingParams(cache=CacheControl(ttl=60)))
