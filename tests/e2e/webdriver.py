"""A real headless Chromium, driven through chromedriver's HTTP interface (W3C WebDriver). For test_page.py."""

from __future__ import annotations

import base64
import contextlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the name the standard gives to element references
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-proxy-server",
    "--window-size=1280,860",
)


class Browser:
    def __init__(self, http: httpx.Client, path: str) -> None:
        self._http = http
        self._path = path

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self._http.request(method, self._path + path, json=body or ({} if method == "POST" else None))
        found = answer.json()["value"]
        assert answer.status_code == 200, found
        return found

    def go(self, url: str) -> None:
        self.call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """What the first such element says; empty if there is none."""
        found: str = self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        return found

    def shown(self, selector: str) -> bool:
        found: bool = self.run("return document.querySelector(arguments[0]).checkVisibility()", selector)
        return found

    def type(self, selector: str, text: str) -> None:
        self.call("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def clear(self, selector: str) -> None:
        self.call("POST", f"/element/{self._find(selector)}/clear")

    def click(self, selector: str) -> None:
        self.call("POST", f"/element/{self._find(selector)}/click")

    def console(self) -> list[str]:
        """Errors and warnings of the page since the last call."""
        lines = self.call("POST", "/se/log", {"type": "browser"})
        return [line["message"] for line in lines if line["level"] in ("SEVERE", "WARNING")]

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        parameters = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}}
        self.call("POST", "/goog/cdp/execute", parameters)

    def screenshot(self) -> bytes:
        return base64.b64decode(self.call("GET", "/screenshot"))

    def _find(self, selector: str) -> str:
        found: str = self.call("POST", "/element", {"using": "css selector", "value": selector})[_ELEMENT]
        return found


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    driver = shutil.which("chromedriver")
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if driver is None or browser is None:
        pytest.skip("no Chromium with its driver (Debian: apt-get install chromium chromium-driver)")
    with tempfile.TemporaryDirectory(prefix="tokenmill-browser-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            ports = (re.search(r"started successfully on port (\d+)", line) for line in process.stdout)
            port = next(match[1] for match in ports if match)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
                options = {"binary": browser, "args": [*_FLAGS, f"--user-data-dir={profile}"]}
                wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
                made = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
                assert "sessionId" in made, made
                path = f"/session/{made['sessionId']}"
                yield Browser(http, path)
                http.delete(path)
        finally:
            process.terminate()
            process.wait()
