"""Adapters on a real server: as models in every API, loaded, replaced and unloaded under load, by those who may."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import RunningServer, serving, wait_until
from tests.e2e.word_model import make_word_model
from tests.random_adapters import make_adapter
from tokenmill.engine.llm import LLM
from tokenmill.types import SamplingParams

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]
NAMES = ("a", "b", "c", "d")
_KEYS = [
    {"key": "admin-key", "name": "admin", "admin": True},
    {"key": "loader-key", "name": "loader", "loads_loras": True},
    {"key": "sql-key", "name": "sql", "loras": ["a", "team-*"]},
    {"key": "none-key", "name": "none", "loras": []},
]


class Place:
    """A model, its adapters in a directory that may be loaded from, and what each of them says."""

    def __init__(self, folder: Path) -> None:
        self.model = make_word_model(folder / "model", TEMPLATE)
        self.adapters = folder / "adapters"
        self.paths = {
            name: make_adapter(self.model, self.adapters / name, seed, rank=2 * seed)
            for seed, name in enumerate(NAMES, 1)
        }
        self.outside = make_adapter(self.model, folder / "outside" / "a", 9)
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        with LLM(self.model, context=64, concurrency=8, loras=self.paths) as llm:
            self.says = {
                name: llm.generate(PROMPT, params, lora=name)[0].outputs[0].token_ids for name in (None, *NAMES)
            }
        assert len({tuple(each) for each in self.says.values()}) == len(self.says)

    @property
    def flags(self) -> tuple[str, ...]:
        loras = [word for name in "ab" for word in ("--lora", f"{name}={self.paths[name]}")]
        limits = ("--max-loras", "2", "--max-lora-rank", "8", "--lora-dir", str(self.adapters))
        return ("--context", "64", "--served-model-name", "base", *loras, *limits)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("loras"))


@pytest.fixture(scope="module")
def server(place: Place) -> Iterator[RunningServer]:
    with serving(place.model, *place.flags) as running:
        yield running


def ask(http: httpx.Client, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return http.post("/v1/completions", json=body | {"return_token_ids": True} | fields)


def said(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def change(http: httpx.Client, verb: str, name: str, **fields: Any) -> httpx.Response:
    return http.post(f"/v1/{verb}_lora_adapter", json={"lora_name": name, **fields})


def metric(server: RunningServer, name: str) -> float:
    found = re.findall(rf"^tokenmill_{name}{{[^}}]*}} (\S+)$", server.http.get("/metrics").text, re.MULTILINE)
    return sum(map(float, found))


def test_adapters_are_models(server: RunningServer, place: Place) -> None:
    models = {each["id"]: each for each in server.http.get("/v1/models").json()["data"]}
    assert list(models) == ["base", "a", "b"]
    assert (models["base"]["parent"], models["a"]["parent"]) == (None, "base")
    assert models["b"]["tokenmill"]["rank"] == 4
    assert str(place.adapters) not in server.http.get("/v1/models").text
    assert server.http.get("/v1/models/a").json()["parent"] == "base"
    assert server.http.get("/v1/models/z").status_code == 404
    assert [each["name"] for each in server.http.get("/api/tags").json()["models"]] == ["base", "a", "b"]


def test_every_api_routes_by_the_models_name(server: RunningServer, place: Place) -> None:
    text = " ".join(f"Ġw{token}" for token in PROMPT)
    options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    messages = [{"role": "user", "content": text}]
    for name in ("a", "b", None):
        model, words = name or "base", "".join(f" w{token}" for token in place.says[name])
        assert said(ask(server.http, model)) == place.says[name]
        chat = server.http.post("/v1/chat/completions", json={"model": model, "messages": messages, **options}).json()
        assert (chat["model"], chat["choices"][0]["message"]["content"]) == (model, words)
        body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
        assert words.startswith(server.http.post("/v1/messages", json=body).json()["content"][0]["text"])
        body = {"model": model, "input": text, "max_output_tokens": 8, "temperature": 0}
        shown = server.http.post("/v1/responses", json=body).json()
        assert shown["model"] == model
        assert words.startswith(shown["output"][0]["content"][0]["text"])
        body = {"model": model, "prompt": text, "raw": True, "stream": False}
        body["options"] = {"num_predict": 8, "temperature": 0}
        assert words.startswith(server.http.post("/api/generate", json=body).json()["response"])
    refused = ask(server.http, "z")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_prefix_hits_stay_within_an_adapter(server: RunningServer) -> None:
    prompt = [(5 * n) % 100 for n in range(33)]

    def cached(model: str) -> int:
        details = ask(server.http, model, prompt=prompt).json()["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"])

    assert [cached(model) for model in ("a", "b", "base")] == [0, 0, 0]
    assert [cached(model) for model in ("a", "b", "base")] == [32, 32, 32]


def test_load_and_unload_and_what_is_refused(server: RunningServer, place: Place) -> None:
    http, before = server.http, metric(server, "adapter_host_bytes")
    assert change(http, "load", "c", lora_path="c").text == "Success: LoRA adapter 'c' added successfully."
    assert said(ask(http, "c")) == place.says["c"]
    again = change(http, "load", "c", lora_path="c")
    assert (again.status_code, again.json()["error"]["code"]) == (400, "adapter_exists")
    assert change(http, "load", "c", lora_path=str(place.paths["d"]), load_inplace=True).status_code == 200
    assert said(ask(http, "c")) == place.says["d"]
    assert change(http, "unload", "c").text == "Success: LoRA adapter 'c' removed successfully."
    assert ask(http, "c").status_code == 404
    assert change(http, "unload", "c").status_code == 404
    wait_until(lambda: metric(server, "adapter_host_bytes") == before, 20)

    bad = make_adapter(place.model, place.adapters / "large", 5, rank=64)
    (place.adapters / "empty").mkdir(exist_ok=True)
    (place.adapters / "link").symlink_to(place.outside)
    linked = place.adapters / "linked"
    linked.mkdir(exist_ok=True)
    (linked / "adapter_config.json").symlink_to(place.outside / "adapter_config.json")
    for path, status, says in (
        (str(bad), 400, "rank 64"),
        ("empty", 400, "adapter_config.json is missing"),
        ("nowhere", 404, "no adapter directory"),
        (str(place.outside), 403, "outside the directories"),
        ("../outside/a", 404, "no adapter directory"),
        ("link", 404, "no adapter directory"),
        ("linked", 403, "outside the allowed directories"),
        ("/etc", 403, "outside the directories"),
        ("/no/such/place", 403, "outside the directories"),
    ):
        answer = change(http, "load", "x", lora_path=path)
        assert (answer.status_code, says in answer.json()["error"]["message"]) == (status, True), answer.text
    for fields in ({"lora_path": "c"}, {"lora_name": "x"}, {"lora_name": "a=b", "lora_path": "c"}):
        assert http.post("/v1/load_lora_adapter", json=fields).status_code == 400
    assert change(http, "load", "base", lora_path="c").status_code == 400
    assert [each["id"] for each in http.get("/v1/models").json()["data"]] == ["base", "a", "b"]


def test_unloading_while_in_use_is_a_conflict_unless_it_drains(server: RunningServer) -> None:
    assert change(server.http, "load", "d", lora_path="d").status_code == 200
    answers: list[list[int]] = []
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json={"model": "d", "prompt": PROMPT, "max_tokens": 50, "ignore_eos": True, "stream": True},
        timeout=60,
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        conflict = change(server.http, "unload", "d")
        done = conflict.status_code == 200  # the whole answer may have been computed already
        if not done:
            assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "adapter_in_use")
            assert change(server.http, "unload", "d", drain=True).status_code == 200
        answers.append([1 for line in lines if line.startswith("data: {")])
    assert answers[0]
    assert ask(server.http, "d").status_code == 404


def test_load_unload_and_replace_under_load_from_16_clients(server: RunningServer, place: Place) -> None:
    """No request is lost, none has another adapter's tokens, and memory is what it was."""
    server.wait_idle()
    before = {name: metric(server, name) for name in ("adapters", "adapter_host_bytes")}
    assert change(server.http, "load", "swap", lora_path="a").status_code == 200
    failures: list[str] = []
    counts: dict[str, int] = {}
    stop = threading.Event()

    def client(number: int) -> None:
        draw = random.Random(number)
        with httpx.Client(base_url=server.url, timeout=120) as http:
            for _ in range(15):
                model = draw.choice(("base", "a", "b", "c", "swap"))
                answer = ask(http, model)
                right = [place.says[None if model == "base" else model]] if model != "swap" else [*place.says.values()]
                if answer.status_code == 404 and model == "c":
                    counts["absent"] = counts.get("absent", 0) + 1
                elif answer.status_code != 200 or said(answer) not in right:
                    failures.append(f"{model}: {answer.status_code} {answer.text[:200]}")
                else:
                    counts[model] = counts.get(model, 0) + 1

    def operator() -> None:
        draw = random.Random(99)
        with httpx.Client(base_url=server.url, timeout=120) as http:
            while not stop.is_set():
                loaded = change(http, "load", "c", lora_path="c")
                swapped = change(http, "load", "swap", lora_path=draw.choice("abcd"), load_inplace=True)
                unloaded = change(http, "unload", "c", drain=draw.random() < 0.5)
                if loaded.status_code not in (200, 400) or swapped.status_code != 200:
                    failures.append(f"operator: {loaded.text} {swapped.text}")
                if unloaded.status_code not in (200, 409):
                    failures.append(f"operator: {unloaded.text}")

    managing = threading.Thread(target=operator)
    clients = [threading.Thread(target=client, args=(number,)) for number in range(16)]
    for thread in (managing, *clients):
        thread.start()
    for thread in clients:
        thread.join()
    stop.set()
    managing.join()
    assert not failures
    assert sum(counts.values()) == 16 * 15
    assert min(counts.get(name, 0) for name in ("base", "a", "b", "swap")) > 0
    change(server.http, "unload", "c", drain=True)
    assert change(server.http, "unload", "swap", drain=True).status_code == 200
    server.wait_idle()
    wait_until(lambda: {name: metric(server, name) for name in before} == before, 20)
    assert metric(server, "adapters_on_device") <= 2


def test_a_replaced_engine_has_the_adapters_again(place: Place) -> None:
    with serving(place.model, *place.flags) as running:
        assert change(running.http, "load", "c", lora_path="c").status_code == 200
        pid = running.load()["engine_pid"]
        import os
        import signal

        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: running.http.get("/health").status_code == 200 and running.load()["engine_pid"] != pid, 90)
        for name in ("a", "c"):
            assert said(ask(running.http, name)) == place.says[name]


def test_keys_have_rights_to_adapters(place: Place, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": _KEYS}))
    with serving(place.model, *place.flags, "--api-keys-file", str(keys)) as running:
        clients = {
            each["name"]: httpx.Client(base_url=running.url, headers={"x-api-key": each["key"]}, timeout=60)
            for each in _KEYS
        }
        assert change(clients["sql"], "load", "team-1", lora_path="c").json()["error"]["code"] == "lora_right"
        assert change(clients["sql"], "unload", "a").status_code == 403
        assert change(clients["loader"], "load", "team-1", lora_path="c").status_code == 200
        visible = {
            name: [each["id"] for each in client.get("/v1/models").json()["data"]] for name, client in clients.items()
        }
        assert visible["admin"] == ["base", "a", "b", "team-1"]
        assert visible["sql"] == ["base", "a", "team-1"]
        assert visible["none"] == ["base"]
        assert said(ask(clients["sql"], "team-1")) == place.says["c"]
        missing, unknown = ask(clients["sql"], "b"), ask(clients["sql"], "z")
        assert missing.status_code == unknown.status_code == 404
        assert missing.text.replace("'b'", "'z'") == unknown.text  # what it may not use does not exist for it
        assert clients["none"].get("/v1/models/a").status_code == 404
        usage = clients["sql"].get("/v1/usage").json()
        assert usage["models"]["team-1"]["requests"] == 1
        lines = clients["admin"].get("/metrics").text
        assert 'tokenmill_adapter_requests_total{adapter="team-1",model_name="base"} 1.0' in lines
        for client in clients.values():
            client.close()


def test_without_a_directory_nothing_can_be_loaded(place: Place) -> None:
    with serving(place.model, "--context", "64", "--lora-modules", f"a={place.paths['a']}") as running:
        answer = change(running.http, "load", "c", lora_path=str(place.paths["c"]))
        assert (answer.status_code, "--lora-dir" in answer.json()["error"]["message"]) == (403, True)
        assert said(ask(running.http, "a")) == place.says["a"]
