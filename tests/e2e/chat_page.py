"""The page at `/` as a person uses it: what test_page.py and the pictures of the docs do with it."""

from __future__ import annotations

from typing import Any

from tests.e2e.serving import RunningServer, wait_until
from tests.e2e.webdriver import Browser

SECONDS = 60
_CHOOSE = """
const field = document.querySelector(arguments[0]);
if (field.type === "checkbox") field.checked = arguments[1];
else field.value = arguments[1];
field.dispatchEvent(new Event("input", { bubbles: true }));
"""


class ChatPage:
    def __init__(self, browser: Browser, url: str, patience: float = SECONDS) -> None:
        self.browser, self.url, self.patience = browser, url, patience

    def open(self, key: str = "", *, fresh: bool = True) -> None:
        """`fresh`: as in a browser that was never here."""
        self.browser.go(f"{self.url}/page/base.css")  # of the same origin, without scripts
        if fresh:
            self.browser.run("localStorage.clear(); sessionStorage.clear()")
        if key:
            self.browser.run("sessionStorage.setItem('tokenmill.key', arguments[0])", key)
        self.browser.go(f"{self.url}/")
        self.browser.console()
        if key:
            wait_until(lambda: self.has("#compare") and self.browser.text("#status") == "ready", SECONDS)

    def has(self, selector: str) -> bool:
        return self.count(selector) > 0

    def count(self, selector: str) -> int:
        found: int = self.browser.run("return document.querySelectorAll(arguments[0]).length", selector)
        return found

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)"
        found: list[str] = self.browser.run(script, selector)
        return found

    def set(self, **settings: Any) -> None:
        """Fields of the settings panel by their ids."""
        for name, value in settings.items():
            self.browser.run(_CHOOSE, f"#{name}", value)

    def say(self, text: str, **settings: Any) -> None:
        self.set(**settings)
        self.browser.type("#prompt", text)
        self.browser.press("ENTER")

    def ask(self, text: str, **settings: Any) -> None:
        """`say`, and wait until every column has answered."""
        self.say(text, **settings)
        self.wait()

    def wait(self) -> None:
        wait_until(lambda: self.has(".answer") and not self.has(".answer[aria-busy=true]"), self.patience)

    def see(self, selector: str, text: str) -> None:
        """Until an element says `text`."""
        wait_until(lambda: text in self.browser.text(selector), SECONDS)


def api_answer(server: RunningServer, messages: list[dict[str, str]], **body: Any) -> str:
    answer = server.http.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, **body})
    found: str = answer.json()["choices"][0]["message"]["content"]
    return found
