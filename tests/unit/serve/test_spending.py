"""Costs through the whole application, with an engine that takes a known time: usage.cost, budgets, /v1/usage, metrics,
and batches of a key that has spent its budget."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.serve.live_server import until
from tests.unit.serve.test_file_routes import AnsweringEngine, Site, run
from tokenmill.serve.generation import Generation
from tokenmill.serve.tenants.keys import Client, KeyRing, digest_of
from tokenmill.serve.tenants.prices import Prices
from tokenmill.types import TokenEvent

_URL = "/v1/completions"
_BODY = {"prompt": [1, 2, 3], "max_tokens": 4}
_SECONDS = 0.5  # of device time, that a request takes
_PRICES = Prices(3.6)
_COST = 0.0005


class BilledEngine(AnsweringEngine):
    on_device_time: Any = None

    def answer(self, generation: Generation, finish_reason: str | None) -> None:
        for member in generation.members:
            request = member.request
            member.take(TokenEvent(request.request_id, 0, [5], finish_reason=finish_reason, device_seconds=_SECONDS))
            for observer in self.observers:
                observer.on_tokens(member, 1)
            self.on_device_time({request.tenant: _SECONDS})

    def withdraw(self, generation: Generation) -> None:
        for member in generation.members:
            for observer in self.observers:
                observer.on_end(member)


def _ring(**settings: dict[str, Any]) -> KeyRing:
    entries = []
    for name, values in settings.items():
        client = Client(name, **values)
        client.owner = f"name {name}"
        entries.append((digest_of(f"{name}-key"), client))
    return KeyRing(entries)


def _site(folder: Path | None = None, prices: Prices | None = _PRICES, **settings: dict[str, Any]) -> Site:
    keys = _ring(**(settings or {"alice": {}, "bob": {}, "boss": {"metrics": True}}))
    return Site(folder, BilledEngine(), keys, prices, max_metric_keys=3)


async def _metrics(site: Site, key: str = "boss") -> dict[tuple[str, str], float]:
    text = (await site.ask(key, "GET", "/metrics")).text
    return {
        (sample.name, sample.labels.get("key") or sample.labels.get("state", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_answers_say_what_they_cost_and_keys_are_charged_for_it() -> None:
    async def scenario(site: Site) -> None:
        costs = {"alice": 0.0, "bob": 0.0}
        for key, body in (("alice", _BODY), ("bob", _BODY | {"prompt": [[1, 2], [3]]}), ("alice", _BODY)):
            answer = await site.ask(key, "POST", _URL, json=body)
            costs[key] += answer.json()["usage"]["cost"]
        streamed = await site.ask(
            "bob", "POST", _URL, json=_BODY | {"stream": True, "stream_options": {"include_usage": True}}
        )
        assert f'"cost":{_COST:g}' in streamed.text
        costs["bob"] += _COST
        embedded = await site.ask("bob", "POST", "/v1/embeddings", json={"input": [1, 2]})
        costs["bob"] += embedded.json()["usage"]["cost"]
        assert costs == pytest.approx({"alice": 2 * _COST, "bob": 4 * _COST})
        own = (await site.ask("alice", "GET", "/v1/usage")).json()
        assert own["cost"] == pytest.approx(costs["alice"])
        assert own["models"]["m"] == {"requests": 2, "prompt_tokens": 6, "cached_tokens": 0, "completion_tokens": 2,
                                      "device_seconds": 1.0, "cost": own["cost"]}  # fmt: skip
        assert own["budget"] is None
        assert {"keys", "device"} & own.keys() == set()  # nothing of the others
        bill = (await site.ask("boss", "GET", "/v1/usage")).json()
        assert {each["key"]: each["cost"] for each in bill["keys"] if each["cost"]} == pytest.approx(costs)
        assert bill["device"]["busy_cost"] == pytest.approx(sum(costs.values()), rel=0.01)
        assert bill["device"]["dollars_per_hour"] == 3.6
        shown = await _metrics(site)
        assert shown["tokenmill_key_cost_dollars_total", "bob"] == pytest.approx(costs["bob"])
        assert shown["tokenmill_device_cost_dollars_total", "busy"] == pytest.approx(sum(costs.values()))
        assert shown["tokenmill_device_seconds_total", "idle"] >= 0.0
        assert (await site.ask("nobody", "GET", "/v1/usage")).status_code == 401

    run(_site(), scenario)


def test_without_a_price_nothing_has_a_cost() -> None:
    async def scenario(site: Site) -> None:
        assert "cost" not in (await site.ask("alice", "POST", _URL, json=_BODY)).json()["usage"]
        bill = (await site.ask("boss", "GET", "/v1/usage")).json()
        assert bill["device"] is None
        assert sum(each["cost"] for each in bill["keys"]) == 0.0
        assert (await _metrics(site))["tokenmill_key_requests_total", "alice"] == 1.0

    run(_site(prices=None), scenario)


def test_a_spent_budget_refuses_the_next_request_in_every_dialect() -> None:
    async def scenario(site: Site) -> None:
        for _ in range(2):
            assert (await site.ask("alice", "POST", _URL, json=_BODY)).status_code == 200
        before = len(site.engine.ranks)
        refused = await site.ask("alice", "POST", _URL, json=_BODY)
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
        assert refused.headers["x-should-retry"] == "false"
        message = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        anthropic = await site.ask("alice", "POST", "/v1/messages", json=message | {"model": "m"})
        assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (429, "billing_error")
        ollama = await site.ask("alice", "POST", "/api/generate", json={"model": "m", "prompt": "x"})
        assert ollama.status_code == 429
        assert "exceeded" in ollama.json()["error"]
        assert len(site.engine.ranks) == before
        assert (await site.ask("bob", "POST", _URL, json=_BODY)).status_code == 200
        budget = (await site.ask("alice", "GET", "/v1/usage")).json()["budget"]
        assert (budget["remaining"], budget["budget_duration"]) == (0.0, "30d")
        shown = await _metrics(site)
        assert shown["tokenmill_key_budget_left_dollars", "alice"] == 0.0
        assert ("tokenmill_key_budget_left_dollars", "bob") not in shown
        assert site.service.metrics.get("admission_rejections") == 3
        alice = site.keys.find("alice-key")
        assert alice is not None
        assert alice.num_active == 0

    budget = {"max_budget": 1.5 * _COST, "budget_duration": "30d"}
    run(_site(alice=budget, bob={}, boss={"metrics": True}), scenario)


def test_metrics_have_a_bounded_number_of_keys() -> None:
    async def scenario(site: Site) -> None:
        for number in range(12):
            assert (await site.ask(f"k{number}", "POST", _URL, json=_BODY)).status_code == 200
        shown = await _metrics(site, "k0")
        values = {label: value for (name, label), value in shown.items() if name == "tokenmill_key_requests_total"}
        assert values == {"k0": 1.0, "k1": 1.0, "k2": 1.0, "other": 9.0}
        labels = {label for name, label in shown if name.startswith("tokenmill_key_")}
        assert labels == set(values)

    run(_site(**{f"k{number}": {"metrics": True} for number in range(12)}), scenario)


def test_a_batch_waits_for_the_budget_of_its_key(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        runner = site.service.batches
        assert runner is not None
        runner._concurrency = 1  # one row after the other
        asked: list[Client] = []

        def has_room(client: Client, _model: str | None) -> bool:
            asked.append(client)
            return site.service.has_room(client)

        runner._has_room = has_room
        running = asyncio.create_task(site.batch("alice", *[_BODY] * 4))
        alice = site.keys.find("alice-key")
        assert alice is not None
        await until(lambda: not site.service.accounts.within_budget(alice, 0.0))
        asked.clear()
        await until(lambda: len(asked) > 3)
        assert not running.done()
        assert len(site.engine.ranks) == 2
        alice.adopt(Client("alice", max_budget=1.0))  # its operator raises it
        alice.owner = "name alice"
        batch = await running
        assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 4)

    run(_site(tmp_path, alice={"max_budget": 1.5 * _COST}, bob={}), scenario)


def test_the_key_of_an_open_server_pays_too() -> None:
    async def scenario(site: Site) -> None:
        transport = httpx.ASGITransport(site.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.post(_URL, json=_BODY)
            assert answer.json()["usage"]["cost"] == pytest.approx(_COST)
            bill = (await client.get("/v1/usage")).json()
        assert (bill["key"], bill["cost"]) == ("", pytest.approx(_COST))
        assert bill["device"]["busy_seconds"] == _SECONDS

    run(Site(None, BilledEngine(), KeyRing(), _PRICES), scenario)
