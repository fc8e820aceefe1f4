"""What MODEL means, and which indexes the user has configured."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tokenmill.checkpoint.sources import aliases, list_cached, resolve
from tokenmill.checkpoint.sources.base import Resolved
from tokenmill.checkpoint.sources.download import Page
from tokenmill.checkpoint.sources.npm_registry import read_npm_registry
from tokenmill.checkpoint.sources.pip_index import (
    DEFAULT_INDEX,
    parse_page,
    parse_pip_config,
    read_pip_settings,
    settings_from,
)
from tokenmill.errors import UserError


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))


def test_npm_registry_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("npm_config_registry", raising=False)
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "https://mirror.example/npm/")
    assert read_npm_registry() == "https://mirror.example/npm/"


def test_pip_configuration_is_read_as_pip_download_would() -> None:
    listing = (
        "global.index-url='https://a.example/simple'\nglobal.timeout='7'\ninstall.index-url='https://no.example'\n"
        "download.index-url='https://b.example/simple'\n:env:.cert='/ca.pem'\n"
        "global.extra-index-url='https://c.example/simple\\nhttps://d.example/simple'\n:env:.trusted-host='c.example'\n"
    )
    settings = settings_from(parse_pip_config(listing), DEFAULT_INDEX)
    hosts = ("https://b.example/simple", "https://c.example/simple", "https://d.example/simple")
    assert settings.indexes == hosts
    assert (settings.transport.cert, settings.transport.timeout) == ("/ca.pem", 7.0)
    assert settings.transport.trusted_hosts == {"c.example"}


def test_settings_come_from_the_installed_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "one two")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    settings = read_pip_settings()
    assert settings.indexes == ("https://mirror.example/simple",)
    assert settings.find_links == ("one", "two")


def test_page_links_are_absolute_and_unquoted() -> None:
    body = b'<base href="https://files.example/x/"><a href="a%2B1.whl#sha256=beef&amp;x=1">a</a><a>no target</a>'
    [(filename, link)] = parse_page(Page("https://index.example/simple/a/", "text/html", body))
    assert (filename, link.url, link.sha256) == ("a+1.whl", "https://files.example/x/a%2B1.whl", "beef")


def test_existing_path_wins_over_an_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    assert resolve("smollm2") == Resolved(tmp_path / "smollm2", 2, "local")


@pytest.mark.parametrize("model", ["./no/such", "/no/such", "~/no/such/model", "model.gguf", "dir/model.gguf"])
def test_missing_path_is_named(model: str) -> None:
    with pytest.raises(UserError, match=f"no file or directory '{model}'"):
        resolve(model)


def test_unknown_name_suggests_the_nearest_alias() -> None:
    with pytest.raises(UserError, match="did you mean 'smollm2'"):
        resolve("smolm2")


def test_revision_for_what_has_none_is_refused(tmp_path: Path) -> None:
    for model in (str(tmp_path), "smollm2"):
        with pytest.raises(UserError, match="revisions are for Hugging Face ids"):
            resolve(model, revision="main")


def test_shipped_table_is_consistent() -> None:
    table = aliases()
    assert set(table) == {"smollm2", "gemma3-270m", "qwen2.5-coder-1.5b", "stories15m", "minilm", "all-minilm-l6-v2"}
    for alias in set(table.values()):
        assert alias.license
        assert alias.convert or [piece.file for piece in alias.pieces] == [alias.file]
        digests = [item.sha256 for item in (*alias.packages, *alias.pieces)]
        assert all(len(digest) == 64 for digest in digests)
        assert len(set(digests)) == len(digests)
    assert list_cached() == {}
