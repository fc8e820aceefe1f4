"""Makes docs/images/page_{light,dark,phone}.png: the web page of a running server, as a browser shows it.

    python -m docs.make_page_pictures http://127.0.0.1:8000 [light] [dark] [phone]

Needs selenium and a Chromium with its driver. The first two models of the server are asked side by side; the last one
has some load while the dashboard is taken.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import httpx

from tests.e2e.chat_page import SECONDS, ChatPage
from tests.e2e.serving import wait_until
from tests.e2e.webdriver import Browser, chromium

IMAGES = Path(__file__).parent / "images"
_SYSTEM = "You are a careful programmer. Answer in a sentence and a short code block."
_QUESTION = "Write a Python function that reverses a string."
_STORY = "Tell me a story about a windmill that grinds words into tokens."
_CALLERS = 3
_READINGS = "return document.querySelector('#chart-speed .stroke').getAttribute('d').split('L').length"


def main() -> None:
    url, wanted = sys.argv[1].rstrip("/"), sys.argv[2:] or ["light", "dark", "phone"]
    with chromium() as browser:
        page = ChatPage(browser, url, patience=300)
        browser.prefer("light")
        browser.resize(1400, 900, scale=2)
        if "light" in wanted:
            _warm_up(url)
            page.open()
            wait_until(lambda: page.has("#compare"), SECONDS)
            browser.click("#compare")
            _ask(browser, page)
            _save(browser, "light")
        browser.prefer("dark")
        if "dark" in wanted:
            page.open()
            browser.click("#tab-board")
            _take_board(browser, url)
        if "phone" in wanted:
            browser.resize(390, 844, scale=2)
            page.open()
            wait_until(lambda: page.has("#compare"), SECONDS)
            _ask(browser, page)
            _save(browser, "phone")


def _warm_up(url: str) -> None:
    """The first request of a model is not like the others: it may have to be loaded."""
    for model in [each["id"] for each in httpx.get(f"{url}/v1/models").json()["data"]][:2]:
        body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).raise_for_status()


def _ask(browser: Browser, page: ChatPage) -> None:
    page.ask(_QUESTION, temperature="0", max_tokens="200", system=_SYSTEM)
    browser.run("document.querySelector('#log').scrollTop = 0")


def _take_board(browser: Browser, url: str) -> None:
    """While a few callers ask."""
    done = threading.Event()
    model = httpx.get(f"{url}/v1/models").json()["data"][-1]["id"]

    def call(number: int) -> None:
        messages = [{"role": "system", "content": _STORY * 4}, {"role": "user", "content": f"Story {number}, please."}]
        while not done.is_set():
            body = {"model": model, "messages": messages, "max_tokens": 24 + 16 * number}
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(_CALLERS)]
    for caller in callers:
        caller.start()
    try:
        wait_until(lambda: browser.run(_READINGS) > 90, 300)
        _save(browser, "dark")
    finally:
        done.set()
        for caller in callers:
            caller.join()


def _save(browser: Browser, name: str) -> None:
    path = IMAGES / f"page_{name}.png"
    path.write_bytes(browser.screenshot())
    print(path)


if __name__ == "__main__":
    main()
