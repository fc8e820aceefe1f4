"""Names of models: which a server offers, what is wrong with a file of them, and which model a request gets."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from tokenmill.errors import UserError
from tokenmill.serve.errors import ApiError
from tokenmill.serve.fleet.catalog import Catalog, added, read_catalog
from tokenmill.serve.fleet.routing import Routes
from tokenmill.serve.keep_alive import parse_keep_alive
from tokenmill.serve.tenants.keys import Client

_FILE = {
    "port": 9000,
    "context": 64,
    "models": [
        {"model": "org/large", "name": "large", "aliases": ["gpt-4o"], "context": "1k", "keep_alive": 300},
        "small",
    ],
    "splits": {"chat": {"large": 90, "small": 10}},
}


def read(**changes: Any) -> Catalog:
    return read_catalog([], {}, {**_FILE, **changes}, "models.yaml")


def test_a_file_has_options_of_the_server_and_of_each_model() -> None:
    catalog = read()
    large, small = catalog.models
    assert (large.source, large.names, large.engine.context, large.keep_alive) == (
        "org/large",
        ("large", "gpt-4o"),
        1024,
        300,
    )
    assert (small.source, small.names, small.engine.context, small.keep_alive) == ("small", ("small",), 64, math.inf)
    assert catalog.config.port == small.config.port == 9000
    assert catalog.splits == {"chat": {"large": 0.9, "small": 0.1}}
    flags = read_catalog([], {"context": 32}, _FILE, "models.yaml")
    assert {spec.engine.context for spec in flags.models} == {32}  # a flag wins over the file
    pulled = added(small, "org/other")
    assert (pulled.name, pulled.engine.context) == ("org/other", 64)


def test_a_pulled_model_has_nothing_that_is_made_for_another() -> None:
    given = {"lora": ["sql=/a"], "chat_template": "{{ 1 }}", "tool_call_parser": "hermes", "context": 64}
    first = read_catalog(["a"], {**given, "override_generation_config": '{"top_k": 1}'}, {}, "").models[0]
    pulled = added(first, "org/other")
    assert (pulled.engine.lora, pulled.config.chat_template, pulled.config.override_generation_config) == ((), "", "")
    assert (pulled.config.tool_call_parser, pulled.engine.context) == ("auto", 64)


@pytest.mark.parametrize("name", ["small", "gpt-4o", "chat", "small:latest"])
def test_an_adapter_has_a_name_of_its_own(name: str) -> None:
    entry = {"model": "org/large", "name": "large", "aliases": ["gpt-4o"], "lora": [f"{name}=/a"]}
    with pytest.raises(UserError, match="adapter"):
        read(models=[entry, "small"])
    with pytest.raises(UserError, match="adapter"):
        read_catalog(["a", "b"], {"lora": ["sql=/a"]}, {}, "")  # of which of them?


def test_models_of_the_command_line() -> None:
    catalog = read_catalog(["a", "b"], {}, {}, "")
    assert [spec.names for spec in catalog.models] == [("a",), ("b",)]
    named = read_catalog(["a"], {"served_model_name": ["x", "y"]}, {}, "")
    assert named.models[0].names == ("x", "y")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"models": ["a", "a"], "splits": {}}, "two models are called 'a'"),
        ({"models": [{"model": "b", "aliases": ["a"]}, "a"], "splits": {}}, "two models are called 'a'"),
        ({"models": []}, "not a list"),
        ({"models": [{"name": "a"}]}, "no `model`"),
        ({"models": [{"model": "a", "port": 1}], "splits": {}}, "port is an option of the whole server"),
        ({"models": [{"model": "a", "contxt": 1}], "splits": {}}, "unknown option 'contxt'"),
        ({"splits": {"chat": {"large": 0.5, "small": 0.4}}}, "sum to 0.9"),
        ({"splits": {"chat": {"large": 1.5, "small": -0.5}}}, "sum to 1.5"),
        ({"splits": {"chat": {"large": 0.5, "smal": 0.5}}}, "did you mean 'small'"),
        ({"splits": {"large": {"large": 1}}}, "name of a model"),
        ({"splits": {"chat": 1}}, "no names with shares"),
        ({"keep_alive": "soon"}, "keep_alive is 'soon'"),
        ({"traffic_log": "somewhere"}, "--traffic-log is given for 2 models"),
        ({"served_model_name": ["x"]}, "--served-model-name is given for 2 models"),
    ],
)
def test_what_is_wrong_with_a_file(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        read(**changes)


def test_models_are_given_once() -> None:
    with pytest.raises(UserError, match="on the command line and in"):
        read_catalog(["a"], {}, _FILE, "models.yaml")


def routes() -> Routes:
    catalog = read()
    return Routes([spec.names for spec in catalog.models], catalog.splits)


def test_names_aliases_and_latest() -> None:
    client, found = Client(), routes()
    asked = (None, "large", "gpt-4o", "large:latest", "small")
    assert [found.find(name, client) for name in asked] == ["large", "large", "large", "large", "small"]
    assert dict(found.names(client)) == {"large": "large", "gpt-4o": "large", "small": "small", "chat": "large"}
    with pytest.raises(ApiError) as refusal:
        found.find("medium", client)
    assert refusal.value.status == 404
    assert all(name in refusal.value.message for name in ("'large'", "'gpt-4o'", "'small'", "'chat'"))


def test_a_split_gives_each_model_its_share_in_every_run_of_requests() -> None:
    client, found = Client(), routes()
    chosen = [found.find("chat", client) for _ in range(100)]
    assert Counter(chosen) == {"large": 90, "small": 10}
    for start in range(0, 100, 10):
        assert Counter(chosen[start : start + 10])["small"] == 1


def test_a_key_sees_the_models_that_it_may_use() -> None:
    client, found = Client("k", models=("small",)), routes()
    assert found.find(None, client) == "small"
    assert {found.find("chat", client) for _ in range(20)} == {"small"}
    assert dict(found.names(client)) == {"small": "small", "chat": "small"}
    with pytest.raises(ApiError) as refusal:
        found.find("large", client)
    assert refusal.value.status == 404
    assert "gpt-4o" not in refusal.value.message
    assert found.find("large", Client("k", models=("small",), admin=True)) == "large"
    with pytest.raises(ApiError):
        found.find(None, Client("k", models=("gone",)))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("90", 90), (90, 90), ("1.5s", 1.5), (0, 0), ("0", 0), ("100ms", 0.1)],
)
def test_keep_alive_as_ollama_writes_it(value: str | int, seconds: float) -> None:
    assert parse_keep_alive(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", [-1, "-1", "-5m"])
def test_a_negative_keep_alive_has_no_end(value: str | int) -> None:
    assert parse_keep_alive(value) == math.inf


@pytest.mark.parametrize("value", ["", "5 minutes", "m", "5m5", "nan", True, math.nan])
def test_what_is_no_keep_alive(value: Any) -> None:
    with pytest.raises(ValueError, match="write it like"):
        parse_keep_alive(value)


def test_a_keep_alive_of_any_size_is_understood() -> None:
    assert parse_keep_alive(10**400) >= 1e18
    assert parse_keep_alive(-(10**400)) == math.inf
