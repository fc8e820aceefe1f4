"""Makes docs/images/page_{light,dark,phone}.png: the web page of a running server, as a browser shows it.

    python -m docs.make_page_pictures http://127.0.0.1:8000

Needs selenium and a Chromium with its driver. The first two models of the server are asked.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.e2e.chat_page import SECONDS, ChatPage
from tests.e2e.serving import wait_until
from tests.e2e.webdriver import Browser, chromium

IMAGES = Path(__file__).parent / "images"
_QUESTION = "Write a Python function that tells whether a number is prime, then a table of the primes below 10."
_STORY = "Tell me a story about a windmill that grinds words into tokens."


def main() -> None:
    url = sys.argv[1].rstrip("/")
    with chromium() as browser:
        page = ChatPage(browser, url, patience=300)
        browser.prefer("light")
        browser.resize(1400, 900, scale=2)
        page.open()
        wait_until(lambda: page.has("#compare"), SECONDS)
        browser.click("#compare")
        page.ask(_QUESTION, temperature="0", max_tokens="260", system="You are a careful programmer.")
        browser.run("document.querySelector('#log').scrollTop = 0")
        _save(browser, "light")
        page.say(_STORY, max_tokens="400", temperature="0.7")
        browser.prefer("dark")
        browser.click("#tab-board")
        readings = "return (document.querySelector('#chart-speed .stroke').getAttribute('d').match(/L/g) ?? []).length"
        wait_until(lambda: browser.run(readings) > 60, 5 * SECONDS)
        browser.resize(1400, 900, scale=2)
        _save(browser, "dark")
        browser.resize(390, 844, scale=2)
        page.open()
        wait_until(lambda: page.has("#compare"), SECONDS)
        page.ask(_QUESTION, temperature="0", max_tokens="260")
        browser.run("document.querySelector('#log').scrollTop = 0")
        _save(browser, "phone")


def _save(browser: Browser, name: str) -> None:
    path = IMAGES / f"page_{name}.png"
    path.write_bytes(browser.screenshot())
    print(path)


if __name__ == "__main__":
    main()
