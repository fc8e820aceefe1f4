"""A headless Chromium for tests, driven by selenium: Debian's browser and driver, nothing is downloaded.

Skips where either is missing. Called by test_page.py and by the tests of the HTML reports.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-proxy-server",
    "--window-size=1280,860",
)


class Browser:
    """The few verbs that the tests need, on elements given by CSS selectors."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def go(self, url: str) -> None:
        self._driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        return self._driver.execute_script(script, *arguments)

    def run_async(self, script: str, *arguments: Any) -> Any:
        """The last of `arguments` in the script is what it calls with its result."""
        return self._driver.execute_async_script(script, *arguments)

    def text(self, selector: str) -> str:
        """The text of the first such element; empty if there is none."""
        found: str = self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        return found

    def shown(self, selector: str) -> bool:
        found: bool = self._find(selector).is_displayed()
        return found

    def type(self, selector: str, text: str) -> None:
        self._find(selector).send_keys(text)

    def press(self, *keys: str) -> None:
        """Keys for whatever has the focus, by their names in selenium: ENTER, ARROW_RIGHT; or as text. All at once
        where one is CONTROL or SHIFT."""
        from selenium.webdriver import ActionChains, Keys

        codes = [getattr(Keys, key, key) for key in keys]
        actions = ActionChains(self._driver)
        for code in codes:
            actions.key_down(code)
        for code in reversed(codes):
            actions.key_up(code)
        actions.perform()

    def hover(self, selector: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self._driver).move_to_element(self._find(selector)).perform()

    def clear(self, selector: str) -> None:
        self._find(selector).clear()

    def click(self, selector: str) -> None:
        self._find(selector).click()

    def console(self) -> list[str]:
        """Errors and warnings of the page since the last call."""
        lines = self._driver.get_log("browser")
        return [line["message"] for line in lines if line["level"] in ("SEVERE", "WARNING")]

    def prefer(self, scheme: str, medium: str = "") -> None:
        """`scheme`: light or dark; `medium`: print, or empty for the screen."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": medium, "features": features})

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        """The size of the page, below what a window allows: phones are 360 wide. `scale`: of pictures."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def screenshot(self) -> bytes:
        image: bytes = self._driver.get_screenshot_as_png()
        return image

    def _find(self, selector: str) -> Any:
        return self._driver.find_element("css selector", selector)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    driver = shutil.which("chromedriver")
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if driver is None or browser is None:
        pytest.skip("no Chromium with its driver (Debian: apt-get install chromium chromium-driver)")
    with tempfile.TemporaryDirectory(prefix="tokenmill-browser-", ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = browser
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        running = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        try:
            yield Browser(running)
        finally:
            running.quit()
