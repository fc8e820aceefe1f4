"""Routes of other servers are refused by name, with what to use instead, and never hide one of our own."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tokenmill.serve.api.absent import ABSENT, add_absent_routes
from tokenmill.serve.errors import ApiError


@pytest.mark.parametrize(("method", "path", "reason"), ABSENT)
def test_the_answer_says_what_to_use(method: str, path: str, reason: str) -> None:
    app = FastAPI()
    add_absent_routes(app)
    with pytest.raises(ApiError) as caught:
        TestClient(app).request(method, path.replace("{digest}", "sha256:1"))
    assert (caught.value.status, caught.value.code) == (404, "route_not_supported")
    assert path in caught.value.message
    assert caught.value.message.endswith(reason)


def test_a_route_that_exists_comes_first() -> None:
    app = FastAPI()

    @app.post("/pooling")
    async def pooling() -> str:
        return "pooled"

    add_absent_routes(app)
    assert TestClient(app).post("/pooling").json() == "pooled"


def test_each_is_listed_once() -> None:
    assert len({(method, path) for method, path, _ in ABSENT}) == len(ABSENT)
