"""Money on a real model: in a mixed run the keys' costs add up to the device's time, a budget ends, a restart forgets
nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.serving import RunningServer, serving, wait_until

_PRICE = 3600.0  # a dollar per second
_FLAGS = ("--context", "256", "--concurrency", "4", "--served-model-name", "stories", "--no-access-log")
_KEYS: list[dict[str, Any]] = [
    {"key": "alice-key", "name": "alice"},
    {"key": "bob-key", "name": "bob", "weight": 2},
    {"key": "ops-key", "name": "ops", "metrics": True},
]


class Shop:
    def __init__(self, server: RunningServer) -> None:
        self.server = server
        server.http.headers["x-api-key"] = "ops-key"
        self.costs = {"alice": 0.0, "bob": 0.0}
        self._lock = threading.Lock()

    def ask(self, key: str, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        body = {"prompt": "Once upon a time", "ignore_eos": True, "temperature": 0, **body}
        if path == "/v1/embeddings":
            body = {"input": body["prompt"]}
        answer = self.server.http.post(path, json=body, headers={"x-api-key": f"{key}-key"})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        with self._lock:
            self.costs[key] += found["usage"]["cost"]
        return found

    def leave(self, key: str) -> None:
        """Begin a long answer and go away."""
        body = {"prompt": "There was", "max_tokens": 200, "ignore_eos": True, "stream": True}
        headers = {"x-api-key": f"{key}-key"}
        with self.server.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            next(answer.iter_lines())

    def bill(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.http.get("/v1/usage").json()
        return found

    def keys(self) -> dict[str, dict[str, Any]]:
        return {each["key"]: each for each in self.bill()["keys"]}

    def metric(self, name: str, **labels: str) -> float:
        families = text_string_to_metric_families(self.server.http.get("/metrics").text)
        return sum(sample.value for family in families for sample in family.samples
                   if sample.name == name and labels.items() <= sample.labels.items())  # fmt: skip

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key=f"{key}-key", timeout=60)


def _write(keys: Path, **alice: Any) -> None:
    keys.write_text(json.dumps({"keys": [_KEYS[0] | alice, *_KEYS[1:]]}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("costs")
    _write(found / "keys.json")
    return found


@pytest.fixture(scope="module")
def flags(folder: Path) -> tuple[str, ...]:
    files = ("--api-keys-file", str(folder / "keys.json"), "--usage-file", str(folder / "usage.json"))
    return (*_FLAGS, *files, "--price", f"{_PRICE:g}")


@pytest.fixture(scope="module")
def shop(model_path: Callable[[str], Path], flags: tuple[str, ...]) -> Iterator[Shop]:
    with serving(model_path("stories15m"), *flags) as server:
        yield Shop(server)


def _mixed_run(shop: Shop) -> None:
    """Long and short prompts, siblings, stop strings, embeddings, one that leaves: of two keys at once."""
    long = "and then the cat sat on the mat " * 12
    work: list[Callable[[], object]] = [
        *[lambda: shop.ask("alice", max_tokens=60) for _ in range(3)],
        *[lambda: shop.ask("bob", max_tokens=30, n=2, temperature=1.0) for _ in range(3)],
        *[lambda number=number: shop.ask("alice", prompt=f"{number} {long}", max_tokens=8) for number in range(3)],
        lambda: shop.ask("bob", path="/v1/embeddings", prompt=long),
        lambda: shop.ask("bob", stop=[" the"], max_tokens=100),
        lambda: shop.leave("bob"),
    ]
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shop.server.wait_idle()


def test_the_costs_of_all_keys_add_up_to_the_time_of_the_device(shop: Shop) -> None:
    shop.ask("bob", max_tokens=1)  # with it comes the engine's own count of its time, which has its warm-up too
    shop.server.wait_idle()
    paid, before, began = shop.keys()["bob"]["cost"], shop.bill()["device"], time.monotonic()
    busy = shop.metric("tokenmill_engine_busy_seconds_total")
    _mixed_run(shop)
    bill, passed = shop.bill(), time.monotonic() - began
    busy = shop.metric("tokenmill_engine_busy_seconds_total") - busy
    costs = {each["key"]: each["cost"] for each in bill["keys"]}
    device = bill["device"]
    assert busy > 0.02
    assert costs["alice"] > 0.001
    assert costs["bob"] > 0.001
    assert costs["alice"] + costs["bob"] - paid == pytest.approx(busy * _PRICE / 3600, rel=0.01)
    assert sum(costs.values()) == pytest.approx(device["busy_cost"], rel=1e-6)
    assert device["dollars_per_hour"] == _PRICE
    both = sum(device[name] - before[name] for name in ("busy_seconds", "idle_seconds"))
    assert both == pytest.approx(passed, abs=1.0)
    assert device["idle_cost"] == pytest.approx(device["idle_seconds"] * _PRICE / 3600)
    # What the answers say adds up to what the key is charged, and of bob's all but what nobody waited for.
    assert shop.costs["alice"] == pytest.approx(costs["alice"], rel=0.01)
    assert 0 < shop.costs["bob"] < costs["bob"]
    for name, key in (("key_cost_dollars", "alice"), ("key_device_seconds", "bob")):
        assert shop.metric(f"tokenmill_{name}_total", key=key) == pytest.approx(costs[key], rel=1e-6)
    alice = shop.keys()["alice"]["models"]["stories"]
    assert (alice["requests"], alice["completion_tokens"]) == (6, 3 * 60 + 3 * 8)
    assert httpx.get(f"{shop.server.url}/v1/usage", headers={"x-api-key": "bob-key"}).json().keys() == {
        "object", "key", "cost", "models", "budget"}  # fmt: skip


def test_a_longer_answer_costs_more(shop: Shop) -> None:
    short = shop.ask("alice", prompt="A cat", max_tokens=4)["usage"]["cost"]
    long = shop.ask("alice", prompt="A cat", max_tokens=100)["usage"]["cost"]
    assert long > 5 * short


def test_a_budget_that_is_spent_ends_also_after_a_restart(
    shop: Shop, folder: Path, flags: tuple[str, ...], model_path: Callable[[str], Path]
) -> None:
    shop.ask("alice", max_tokens=4)
    _write(folder / "keys.json", max_budget=shop.keys()["alice"]["cost"] / 2)
    usage = f"{shop.server.url}/v1/usage"
    wait_until(lambda: httpx.get(usage, headers={"x-api-key": "alice-key"}).json()["budget"] is not None, 20)
    with pytest.raises(openai.RateLimitError) as caught:
        shop.client("alice").completions.create(model="stories", prompt="A cat", max_tokens=4)
    assert caught.value.code == "insufficient_quota"
    assert "exceeded your current quota" in caught.value.message
    refused = shop.metric("tokenmill_admission_rejections_total", reason="insufficient_quota")
    assert refused == 1  # the package does not try again
    shop.ask("bob", max_tokens=4)
    spent = shop.keys()
    assert shop.server.stop() == 0
    with serving(model_path("stories15m"), *flags) as server:
        again = Shop(server)
        with pytest.raises(openai.RateLimitError):
            again.client("alice").completions.create(model="stories", prompt="A cat", max_tokens=4)
        again.ask("bob", max_tokens=4)
        kept = again.keys()
        assert kept["alice"] == spent["alice"]
        assert kept["bob"]["cost"] > spent["bob"]["cost"]
