"""The built-in page in a real browser: it chats, stops, shows live numbers, and a key guards it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.serving import RunningServer, serving, wait_until
from tests.e2e.webdriver import Browser, chromium

_SECONDS = 60


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def server(browser: Browser, model_path: Callable[[str], Path]) -> Iterator[RunningServer]:
    """Started only where there is a browser."""
    assert browser
    flags = ("--context", "1024", "--concurrency", "4", "--served-model-name", "small", "--api-key", "se:cret")
    with serving(model_path("smollm2"), *flags) as running:
        running.http.headers["authorization"] = "Bearer se:cret"
        yield running


@pytest.fixture
def page(browser: Browser, server: RunningServer) -> Browser:
    """The page, after the browser's question for the key was answered."""
    browser.go(server.url.replace("http://", "http://anyone:se%3Acret@") + "/")
    browser.go(server.url + "/")
    wait_until(lambda: browser.text("#status") == "ready", _SECONDS)
    return browser


def _done(page: Browser) -> bool:
    return page.shown("#send")


def _say(page: Browser, text: str, **settings: str) -> None:
    for name, value in settings.items():
        selector = "#" + name.replace("_", "-")
        page.clear(selector)
        page.type(selector, value)
    page.type("#prompt", text)
    page.click("#send")


def test_it_chats_as_the_api_does(page: Browser, server: RunningServer) -> None:
    question = "What is the capital of France?"
    _say(page, question, temperature="0", max_tokens="24", system="Answer in one sentence.")
    wait_until(lambda: page.text(".assistant .note") != "", _SECONDS)
    messages = [{"role": "system", "content": "Answer in one sentence."}, {"role": "user", "content": question}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 24}
    answer = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert page.text(".assistant .text") == answer != ""
    assert page.text(".user .text") == question
    assert "tokens/s" in page.text(".assistant .note")
    _say(page, "And of Spain?")  # the second turn has the first before it
    wait_until(
        lambda: page.run("return document.querySelectorAll('.assistant .note:not(:empty)').length") == 2, _SECONDS
    )
    assert "from the cache" in page.text(".turn:last-child .note")
    assert page.console() == []
    _save(page)


def test_stop_ends_the_answer_and_frees_the_engine(page: Browser, server: RunningServer) -> None:
    _say(page, "Tell a long story.", max_tokens="900", temperature="0")  # it goes on to the limit
    wait_until(lambda: len(page.text(".assistant .text")) > 10, _SECONDS)
    assert page.shown("#stop")
    page.click("#stop")
    wait_until(lambda: _done(page), _SECONDS)
    assert "stopped" in page.text(".assistant .note")
    server.wait_idle()


def test_numbers_are_live(page: Browser, server: RunningServer) -> None:
    assert page.text("#model").startswith("small")
    _say(page, "Tell a long story.", max_tokens="900", temperature="0")
    wait_until(lambda: page.text("#running") == "1" and float(page.text("#rate").replace(",", "")) > 0, _SECONDS)
    assert page.text("#kv") != "0.0 %"
    page.click("#stop")
    wait_until(lambda: page.text("#running") == "0", _SECONDS)
    total = server.http.get("/metrics").text.partition("tokenmill_generation_tokens_total{")[2].split()[1]
    wait_until(lambda: page.text("#total").replace(",", "") == f"{float(total):.0f}", _SECONDS)
    assert page.text("#hits") != "-"


def test_markup_of_the_model_or_the_user_stays_text(page: Browser) -> None:
    _say(page, "<img src=x onerror='document.title=\"harmed\"'>", max_tokens="1")
    wait_until(lambda: _done(page), _SECONDS)
    assert page.text(".user .text").startswith("<img")
    assert page.run("return document.querySelectorAll('#log img').length") == 0
    code = page.run("const turn = addTurn('assistant', 'Model'); show(turn, 'so:\\n```py\\nx = 1\\n```\\nend');"
                    "return turn.querySelector('pre').textContent")  # fmt: skip
    assert code == "x = 1"


def test_errors_are_said(page: Browser) -> None:
    _say(page, "word " * 3, max_tokens="5000")
    wait_until(lambda: page.text(".error .text") != "", _SECONDS)
    assert "5000" in page.text(".error .text") or "1024" in page.text(".error .text")
    page.console()  # the browser notes the 400 by itself


def test_the_key_guards_the_page_and_other_sites_cannot_borrow_it(server: RunningServer) -> None:
    http, open_headers = server.http, {"authorization": ""}
    refused = http.get("/", headers=open_headers)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"].startswith("Basic ")
    for password, status in (("se:cret", 200), ("wrong", 401), ("", 401)):
        assert http.get("/", headers=open_headers, auth=("anyone", password)).status_code == status
        assert http.get("/v1/models", headers=open_headers, auth=("", password)).status_code == status
    for site, status in (("same-origin", 200), ("none", 200), ("cross-site", 401), ("same-site", 401)):
        headers = {"sec-fetch-site": site}
        assert http.get("/v1/models", headers=headers, auth=("a", "se:cret")).status_code == status
    assert http.get("/", headers={"authorization": "Basic %%%"}).status_code == 401
    found = http.get("/")
    assert found.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in found.headers["content-security-policy"]
    assert "http://" not in found.text
    assert "https://" not in found.text


def _save(page: Browser) -> None:
    """Pictures for a person to look at, where one asked for them."""
    folder = os.environ.get("TOKENMILL_SCREENSHOTS")
    if folder:
        for scheme in ("light", "dark"):
            page.prefer(scheme)
            (Path(folder) / f"page-{scheme}.png").write_bytes(page.screenshot())
