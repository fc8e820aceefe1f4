"""The application on a real Ray cluster: scaled by load, a replica killed, upgraded; every request is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleet.conftest import Load, engines_of, kill, replica_pids, wait_for
from tokenmill.errors import UserError
from tokenmill.ray.settings import RaySettings, read_settings

app = pytest.importorskip("tokenmill.ray.app", reason="ray is not installed: `make test-ray` runs these")
# On a busy machine replicas start for a minute, and a few calm seconds meanwhile are no calm.
_SCALING = {"max_replicas": 3, "target_queue": 1, "tick_s": 1.0, "down_window_s": 45.0}
_BODY = {"model": "small", "prompt": "Once upon a time", "max_tokens": 240, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def settings(model_path: Callable[[str], Path], port: int) -> Callable[..., RaySettings]:
    def make(**changes: Any) -> RaySettings:
        options = {
            "model": str(model_path("stories15m")),
            "served_model_name": ["small"],
            "port": port,
            "concurrency": 1,  # the engine is what requests wait for, not Python
            "threads": 1,
            "text_workers": 1,
            "spare_engine": False,
            "access_log": False,
        }
        section = {**_SCALING, **changes.pop("ray", {})}
        return read_settings({**options, **changes, "ray": section}, "the test")

    return make


@pytest.fixture(scope="module")
def url(cluster: None, settings: Callable[..., RaySettings]) -> Iterator[str]:  # noqa: ARG001
    yield app.deploy(settings())
    app.delete("tokenmill")


@pytest.fixture(scope="module")
def expected(url: str) -> str:
    """What every replica answers: greedy, and each sequence computes alike whatever runs beside it."""
    answer = httpx.post(f"{url}/v1/completions", json=_BODY, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def running() -> int:
    found: int = app.status()["tokenmill"]["deployments"]["engine"]["replicas"].get("RUNNING", 0)
    return found


def test_load_brings_replicas_and_calm_takes_them_away(url: str, expected: str) -> None:
    assert running() == 1
    with Load(url, _BODY, clients=8) as load:
        wait_for(lambda: running() == 3, "three replicas")
        load.until(12)
    assert load.failures == []
    assert set(load.answers) == {expected}
    wait_for(lambda: running() == 1 and len(replica_pids()) == 1, "one replica")


def test_a_killed_replica_costs_no_answer(url: str, expected: str, settings: Callable[..., RaySettings]) -> None:
    app.deploy(settings(ray={"min_replicas": 2}))
    wait_for(lambda: running() == 2, "two replicas")
    with Load(url, _BODY, clients=6) as load:
        load.until(6)
        before = replica_pids()
        victim = min(before)
        engines = engines_of(victim)
        assert engines
        kill(victim)
        load.until(12)
        wait_for(lambda: running() >= 2 and len(replica_pids() - before) >= 1, "a replica in its place")
        load.until(6)
    assert load.failures == []
    assert set(load.answers) == {expected}
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engines), "the engine of a dead replica ends")


@pytest.mark.parametrize("stream", [False, True])
def test_an_upgrade_under_load_costs_no_answer(
    url: str, expected: str, settings: Callable[..., RaySettings], stream: bool
) -> None:
    name = f"upgraded-{stream}".lower()
    before = replica_pids()
    with Load(url, _BODY, clients=4, stream=stream) as load:
        load.until(4)
        app.deploy(settings(served_model_name=["small", name]))
        wait_for(lambda: not replica_pids() & before, "the old replicas are gone")
        load.until(8)
    assert load.failures == []
    assert set(load.answers) == {expected}
    models = httpx.get(f"{url}/v1/models", trust_env=False, timeout=60).json()["data"]
    assert name in {each["id"] for each in models}


def test_a_client_that_leaves_frees_the_engine(url: str) -> None:
    body = {**_BODY, "max_tokens": 200, "stream": True}
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        for _ in range(4):
            with http.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())

        def idle() -> bool:
            load = http.get("/load").json()
            return not load["server_load"] and not load["kv_pages_held"]

        wait_for(idle, "nothing in flight")
        assert http.get("/readyz").status_code == 200


def test_refusals_come_from_the_replica(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={**_BODY, "max_tokens": -1}, timeout=60, trust_env=False)
    assert answer.status_code == 400
    assert "max_tokens" in answer.json()["error"]["message"]
    assert "x-request-id" in answer.headers
    assert httpx.get(f"{url}/nothing", timeout=60, trust_env=False).status_code == 404


def test_an_upgrade_that_cannot_start_leaves_what_runs(url: str, settings: Callable[..., RaySettings]) -> None:
    with pytest.raises(UserError, match="does not start"):
        app.deploy(settings(model="/nothing/here"))
    answer = httpx.post(f"{url}/v1/completions", json=_BODY, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
