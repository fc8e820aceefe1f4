"""schemathesis sends what the server's own OpenAPI document allows, and what it does not: nothing may be a 5xx."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error

from tests.e2e.serving import serving

_settings = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)


def _probe(strategy: Any, num_examples: int) -> int:
    """How many examples were sent."""
    cases = []

    @settings(_settings, max_examples=num_examples)
    @given(case=strategy)
    def check(case: Any) -> None:
        cases.append(case)
        if isinstance(case.body, dict):
            case.body.pop("model", None)  # almost all names are unknown: 404 and nothing learnt
        case.call_and_validate(checks=[not_a_server_error], timeout=60)

    check()
    return len(cases)


@pytest.mark.parametrize("num_examples", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_no_document_breaks_the_server(model_path: Callable[[str], Path], num_examples: int, tmp_path: Path) -> None:
    flags = ("--context", "128", "--concurrency", "8", "--no-access-log", "--files-dir", str(tmp_path))
    with serving(model_path("stories15m"), *flags) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        operations = [operation.ok() for operation in schema.get_all_operations()]
        num_cases = sum(_probe(operation.as_strategy(), num_examples) for operation in operations)
        assert num_cases > 8 * num_examples
        server.wait_idle()
        assert server.http.get("/health").status_code == 200
