"""Several models in one server: swapped under load where only one fits, asleep and awake, by name, alias and share."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from tests.e2e.serving import RunningServer, wait_until
from tests.e2e.word_model import make_word_model, text_of
from tests.embedding_models import TEXTS, save_embedder
from tokenmill import Embedder
from tokenmill.engine.kv.page_names import page_names
from tokenmill.serve.fleet.catalog import read_catalog
from tokenmill.serve.fleet.making import plan_models
from tokenmill.serve.fleet.plan import SERVER_BYTES

_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
_OPTIONS = {"context": 128, "concurrency": 4, "memory": "64MiB", "text_workers": 1, "device": "cpu"}
_ASK = {"prompt": text_of(5, 6, 7, 8), "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models that answer differently."""
    folder = tmp_path_factory.mktemp("models")
    return {name: make_word_model(folder / family, _TEMPLATE, family=family) for name, family in _FAMILIES.items()}


_FAMILIES = {"one": "llama", "two": "qwen3"}


def catalog_of(paths: dict[str, Path], **changes: Any) -> dict[str, Any]:
    entries = [{"model": str(path), "name": name, "aliases": [f"{name}-alias"]} for name, path in paths.items()]
    return {**_OPTIONS, "models": entries, "splits": {"mix": {"one": 0.5, "two": 0.5}}, **changes}


def room_for_one(models: dict[str, Path], asleep: bool = True) -> int:
    """The limit where one model fits beside the process of the other, or beside nothing."""
    written = catalog_of(models, memory_limit="64GiB")
    (one, two), _ = plan_models(read_catalog([], {}, written, "file"))
    return SERVER_BYTES + one.need.awake + (two.need.asleep if asleep else 0) + (1 << 20)


class Models(RunningServer):
    """A server of the models of a file."""

    def __init__(self, file: Path, content: dict[str, Any], *flags: str) -> None:
        file.write_text(yaml.safe_dump(content))
        self.file = file
        super().__init__(Path(f"--config={file}"), *flags)

    def ask(self, model: str | None, **changes: Any) -> httpx.Response:
        named = {} if model is None else {"model": model}
        return self.http.post("/v1/completions", json={**_ASK, **named, **changes})

    def states(self) -> dict[str, str]:
        found = self.http.get("/v1/models").json()["data"]
        return {each["id"]: each["tokenmill"]["state"] for each in found if each["id"] == each["root"]}

    def text(self, model: str) -> str:
        answer = self.ask(model)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])


@pytest.fixture(scope="module")
def server(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """Only one of its models fits at a time."""
    file = tmp_path_factory.mktemp("server") / "models.yaml"
    running = Models(file, catalog_of(models, memory_limit=room_for_one(models)))
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def texts(server: Models) -> dict[str, str]:
    found = {name: server.text(name) for name in _FAMILIES}
    assert len(set(found.values())) == 2
    return found


def test_two_models_swapped_under_load_lose_no_request(server: Models, texts: dict[str, str]) -> None:
    async def load() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

            async def caller(number: int) -> list[httpx.Response]:
                name = ("one", "two")[number % 2]
                body = {**_ASK, "model": name, "stream": number % 4 > 1}
                return [await client.post("/v1/completions", json=body) for _ in range(10)]

            return [answer for answers in await asyncio.gather(*map(caller, range(8))) for answer in answers]

    answers = asyncio.run(load())
    assert Counter(answer.status_code for answer in answers) == {200: 80}
    for answer in answers:
        name = answer.headers["x-tokenmill-model"]
        assert json.loads(answer.request.content)["model"] == name
        if "event-stream" in answer.headers["content-type"]:
            chunks = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            text = "".join(each["choices"][0]["text"] for each in map(json.loads, chunks) if each["choices"])
        else:
            text = answer.json()["choices"][0]["text"]
        assert text == texts[name]
    metrics = server.http.get("/metrics").text
    for name in _FAMILIES:
        assert f'tokenmill_model_evictions_total{{how="sleep",model_name="{name}"}}' in _sorted_labels(metrics)
    assert sorted(server.states().values()) == ["asleep", "loaded"]


def _sorted_labels(metrics: str) -> str:
    """Label order is the library's choice."""
    import re

    return re.sub(r"{([^}]*)}", lambda found: "{" + ",".join(sorted(found[1].split(","))) + "}", metrics)


def test_names_aliases_and_shares(server: Models, texts: dict[str, str]) -> None:
    assert server.text("two-alias") == texts["two"]
    assert server.text("one:latest") == texts["one"]
    assert server.ask(None).json()["choices"][0]["text"] == texts["one"]
    chosen = Counter(server.ask("mix").headers["x-tokenmill-model"] for _ in range(4))
    assert chosen == {"one": 2, "two": 2}
    listed = [each["id"] for each in server.http.get("/v1/models").json()["data"]]
    assert listed == ["one", "one-alias", "two", "two-alias", "mix"]
    assert [each["name"] for each in server.http.get("/api/tags").json()["models"]] == listed
    assert server.http.get("/v1/models/two-alias").json()["root"] == "two"


def test_an_unknown_model_is_404_with_the_list(server: Models) -> None:
    for path, body in (
        ("/v1/completions", {**_ASK, "model": "three"}),
        ("/v1/messages", {"model": "three", "max_tokens": 1, "messages": [{"role": "user", "content": "Ġw5"}]}),
        ("/api/generate", {"model": "three", "prompt": "Ġw5"}),
        ("/api/generate", {"model": "three"}),
        ("/api/show", {"model": "three"}),
    ):
        answer = server.http.post(path, json=body)
        assert answer.status_code == 404, (path, answer.text)
        assert all(name in answer.text for name in ("'one'", "'two'", "'mix'"))
    assert server.http.get("/v1/models/three").status_code == 404


def test_sleep_and_wake_as_vllm_has_them(server: Models, texts: dict[str, str]) -> None:
    assert server.text("one") == texts["one"]
    assert server.http.get("/is_sleeping", params={"model": "one"}).json() == {"is_sleeping": False}
    pids = {name: load["engine_pid"] for name, load in server.load()["by_model"].items()}
    assert server.http.post("/sleep", params={"level": 1, "model": "one"}).status_code == 200
    assert server.http.get("/is_sleeping", params={"model": "one"}).json() == {"is_sleeping": True}
    assert server.http.get("/readyz").status_code == 200
    assert server.http.get("/readyz", params={"model": "one"}).json()["engine"] == "asleep"
    assert server.http.post("/wake_up", params={"model": "one"}).json()["models"]["one"] == "loaded"
    assert server.text("one") == texts["one"]
    assert server.load()["by_model"]["one"]["engine_pid"] == pids["one"]  # the same process
    assert server.http.post("/sleep", params={"level": 2, "model": "one"}).json()["models"]["one"] == "unloaded"
    assert server.text("one") == texts["one"]  # a request loads it
    assert server.load()["by_model"]["one"]["engine_pid"] != pids["one"]
    for wrong in ({"level": 3}, {"level": "x"}):
        assert server.http.post("/sleep", params=wrong).status_code == 400


def test_keep_alive_and_what_is_loaded_as_ollama_has_them(server: Models) -> None:
    answer = server.http.post("/api/generate", json={"model": "two", "keep_alive": "10m"})
    assert (answer.json()["done_reason"], answer.json()["done"]) == ("load", True)
    (running,) = server.http.get("/api/ps").json()["models"]
    assert running["name"] == "two"
    assert running["expires_at"].startswith("20")
    body = {"model": "two", "prompt": text_of(5, 6), "raw": True, "stream": False, "options": {"num_predict": 2}}
    answer = server.http.post("/api/generate", json={**body, "keep_alive": 0})
    assert answer.status_code == 200, answer.text
    assert "x-tokenmill-ignored" not in answer.headers
    wait_until(lambda: server.states()["two"] == "asleep", 20)
    for wrong in ("soon", True, [], 10**400):
        assert server.http.post("/api/generate", json={**body, "keep_alive": wrong}).status_code == 400
    server.http.post("/api/chat", json={"model": "two", "messages": [], "keep_alive": -1})
    assert server.states()["two"] == "loaded"
    answer = server.http.post("/api/chat", json={"model": "two", "messages": [], "keep_alive": 0})
    assert answer.json()["done_reason"] == "unload"
    assert server.states()["two"] == "unloaded"


def test_a_router_hears_of_the_pages_of_each_model(server: Models) -> None:
    def told(model: str) -> dict[str, Any]:
        answer = server.http.get("/v1/replica/events", params={"model": model})
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    ids = list(range(5, 55))
    for name in _FAMILIES:  # one after the other: only one is awake
        server.ask(name, prompt=text_of(*ids[:4]))
        wait_until(lambda name=name: bool(told(name)["root"]), 20)
        root = server.http.get("/v1/replica/root", params={"model": name}).json()
        assert root["root"] == told(f"{name}-alias")["root"]
        server.ask(name, prompt=text_of(*ids))
        names = page_names(base64.b64decode(root["root"]), ids, root["page_size"])
        assert names
        shown = [base64.b64encode(each).decode() for each in names]
        wait_until(lambda name=name, shown=shown: set(shown) <= {each for each, _ in told(name)["snapshot"]}, 20)
        assert told(name)["model"]["names"][0] == name
        assert told(name)["models"] == list(_FAMILIES)
    assert len({told(name)["root"] for name in _FAMILIES}) == 2
    assert server.http.get("/v1/replica/events").json()["root"] == told("one")["root"]
    assert server.http.get("/v1/replica/events", params={"model": "three"}).status_code == 404


def test_bodies_are_looked_at_without_being_built(server: Models, texts: dict[str, str]) -> None:
    """What is too deep, too long or written oddly goes the way of every other body."""
    head = {"content-type": "application/json"}
    odd = (
        b'{"prompt": "%s", "max_tokens": 8, "temperature": 0, "ignore_eos": true, "model":"one", "mod\\u0065l" : "two"}'
    )
    answer = server.http.post("/v1/completions", content=odd % _ASK["prompt"].encode(), headers=head)  # type: ignore[attr-defined]
    assert answer.headers["x-tokenmill-model"] == "two"
    assert answer.json()["choices"][0]["text"] == texts["two"]
    for value in (b"[" * 200_000, b"[" + b"[]," * 100_000 + b"[]]", b"0", b"{}"):
        for path in ("/api/generate", "/api/chat"):
            body = b'{"model": "one", "prompt": %s, "messages": %s}' % (value, value)
            assert server.http.post(path, content=body, headers=head).status_code == 400
    for name in (5, [], {}, True):
        assert server.http.post("/v1/completions", json={**_ASK, "model": name}).status_code == 400
    assert server.http.post("/v1/completions", json={**_ASK, "model": "x" * 10_000}).status_code == 404


def test_what_a_model_is(server: Models, texts: dict[str, str]) -> None:
    assert server.text("two") == texts["two"]
    shown = server.http.post("/api/show", json={"model": "two"}).json()
    assert shown["details"]["family"] == "qwen3"
    assert shown["model_info"]["qwen3.context_length"] == 128
    assert shown["template"] == _TEMPLATE
    assert "completion" in shown["capabilities"]
    messages = [{"role": "user", "content": text_of(5, 6, 7)}]
    counted = server.http.post("/v1/messages/count_tokens", json={"model": "two", "messages": messages})
    assert counted.json() == {"input_tokens": 3}
    body = {"model": "two", "max_tokens": 1, "messages": messages}
    assert server.http.post("/v1/messages", json=body).json()["usage"]["input_tokens"] == 3


def test_only_names_are_pulled_and_only_cached_models_deleted(server: Models, models: dict[str, Path]) -> None:
    for name in (str(models["one"]), "no such model", "../one"):
        answer = server.http.post("/api/pull", json={"model": name})
        assert answer.status_code == 404, answer.text
        answer = server.http.request("DELETE", "/api/delete", json={"model": name})
        assert answer.status_code in (400, 404), answer.text
    assert server.http.request("DELETE", "/api/delete", json={"model": "one"}).status_code == 400  # it is served


def test_a_pulled_model_is_served_from_then_on(server: Models, model_path: Any) -> None:
    model_path("stories15m")  # so that nothing is fetched here
    with server.http.stream("POST", "/api/pull", json={"model": "stories15m"}) as answer:
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert [lines[0]["status"], lines[-1]["status"]] == ["pulling manifest", "success"]
    answer = server.ask("stories15m:latest", prompt="Once upon a time")
    assert answer.status_code == 200, answer.text
    assert server.http.post("/api/pull", json={"model": "stories15m", "stream": False}).json()["status"] == "success"


def _cli(server: Models, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenmill", *words, "--url", server.url, "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_ps_and_stop(server: Models, texts: dict[str, str]) -> None:
    assert server.text("one") == texts["one"]
    shown = json.loads(_cli(server, "ps").stdout)
    states = {each["name"]: each["state"] for each in shown["models"]}
    assert states["one"] == "loaded"
    stopped = _cli(server, "stop", "one")
    assert json.loads(stopped.stdout) == {"stopped": "one"}
    assert server.states()["one"] == "unloaded"
    unknown = _cli(server, "stop", "three")
    assert unknown.returncode == 2
    assert "'two'" in unknown.stderr


def test_a_killed_engine_is_replaced_and_a_sleeping_one_started_when_needed(
    server: Models, texts: dict[str, str]
) -> None:
    assert server.text("two") == texts["two"]
    assert server.text("one") == texts["one"]
    assert server.states()["two"] == "asleep"
    os.kill(server.load()["by_model"]["two"]["engine_pid"], 9)
    wait_until(lambda: server.states()["two"] == "unloaded", 20)
    assert server.http.get("/livez").status_code == 200
    assert server.text("two") == texts["two"]


def test_keys_and_their_models(models: dict[str, Path], tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    entries = [
        {"key": "narrow-key", "name": "narrow", "models": ["two"]},
        {"key": "boss-key", "name": "boss", "admin": True},
    ]
    keys.write_text(yaml.safe_dump({"keys": entries}))
    content = catalog_of(models, memory_limit=room_for_one(models, asleep=False), api_keys_file=str(keys))
    server = Models(tmp_path / "models.yaml", content, "--load-timeout", "60")
    try:
        for probe in ("/readyz", "/livez"):
            answer = server.http.get(probe)
            assert (answer.status_code, "models" in answer.json()) == (200, False)  # names are for those with a key
            for name in ("two", "nothing"):
                assert server.http.get(probe, params={"model": name}).status_code == 401
        server.http.headers["authorization"] = "Bearer narrow-key"
        assert list(server.http.get("/livez").json()["models"]) == ["two"]
        assert server.http.get("/tokenizer_info", params={"model": "one"}).status_code == 404
        for name, status in (("two", 200), ("two-alias", 200), ("mix", 200), ("one", 404), ("nothing", 404)):
            assert server.http.get("/readyz", params={"model": name}).status_code == status
        assert [each["id"] for each in server.http.get("/v1/models").json()["data"]] == ["two", "two-alias", "mix"]
        assert server.ask("one").status_code == 404
        assert server.ask(None).headers["x-tokenmill-model"] == "two"  # only its process fits: the other was ended
        (own,) = server.http.get("/v1/requests").json()["data"]  # of every model
        assert server.http.get(f"/v1/requests/{own['id']}").json()["prompts"][0]["output_tokens"] == 8
        assert server.http.post("/sleep").status_code == 403
        assert server.http.post("/api/pull", json={"model": "stories15m"}).status_code == 403
        assert server.http.post("/api/generate", json={"model": "two", "keep_alive": 0}).status_code == 403
        server.http.headers["authorization"] = "Bearer boss-key"
        assert server.states() == {"one": "unloaded", "two": "loaded"}
        assert server.http.post("/sleep").status_code == 200
        assert set(server.states().values()) == {"unloaded", "asleep"}
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize("first", [pytest.param("one", marks=pytest.mark.slow), "vectors"])
def test_an_encoder_beside_a_model_that_generates(
    models: dict[str, Path], tmp_path: Path, texts: dict[str, str], first: str
) -> None:
    paths = {"one": models["one"], "vectors": save_embedder(tmp_path / "encoder", "bert")}
    with Embedder(paths["vectors"]) as embedder:
        expected = embedder.embed(TEXTS[:2], normalize=True)
    entries = [{"model": str(paths[name]), "name": name} for name in sorted(paths, key=lambda name: name != first)]
    content = {**_OPTIONS, "models": entries, "memory_limit": "64GiB", "context": 64}
    content.pop("memory")  # of a KV cache, which one of them has not
    server = Models(tmp_path / "models.yaml", content)
    try:
        for _ in range(2):
            assert server.text("one") == texts["one"]
            answer = server.http.post("/v1/embeddings", json={"model": "vectors", "input": TEXTS[:2]}).json()
            np.testing.assert_allclose([each["embedding"] for each in answer["data"]], expected, atol=1e-5)
            assert server.http.post("/sleep", params={"model": "vectors"}).status_code == 200
            assert server.states()["vectors"] == "unloaded"
        shown = server.http.post("/api/show", json={"model": "vectors"}).json()
        assert shown["capabilities"] == ["embedding"]
        assert server.ask("vectors").status_code == 400
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"memory_limit": "200MiB"}, "the limit of all models is 200 MiB"),
        ({"splits": {"mix": {"one": 0.5, "two": 0.4}}}, "sum to 0.9"),
        ({"models": [{"model": "a", "name": "x"}, {"model": "b", "name": "x"}], "splits": {}}, "two models are called"),
    ],
)
def test_what_never_works_is_refused_at_the_start(
    models: dict[str, Path], tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(yaml.safe_dump(catalog_of(models, **changes)))
    command = [sys.executable, "-m", "tokenmill", "serve", "--config", str(file), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert problem in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith(("error:", "try:"))]) == 2
