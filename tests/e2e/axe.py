"""axe-core, the accessibility checker, in a browser: fetched once from the npm registry into the cache of models, and
pinned by its hash. Skips where the registry cannot be reached."""

from __future__ import annotations

import tarfile

import pytest

from tests.e2e.webdriver import Browser
from tokenmill.checkpoint.sources.aliases import Package
from tokenmill.checkpoint.sources.cache import cache_root, exclusive
from tokenmill.checkpoint.sources.download import Transport
from tokenmill.checkpoint.sources.fetch import Fetcher
from tokenmill.checkpoint.sources.pip_index import read_pip_settings
from tokenmill.errors import UnavailableError

_SHA256 = "2277b0a3ef47af9b52497faa3e71598e86e0a0e5e6eb295207a5657ede4709af"
_PACKAGE = Package("npm", "axe-core", "4.14.0", 706680, _SHA256)
_RUN = """
const done = arguments[arguments.length - 1];
const tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];
axe.run(document, { runOnly: tags, resultTypes: ["violations"] }).then(
  (found) => done(found.violations.flatMap((rule) => rule.nodes.map(
    (node) => rule.id + " at " + node.target.join(" ") + ": " + node.failureSummary.replaceAll("\\n", " ")))),
  (error) => done(["axe failed: " + error]));
"""


def axe_source() -> str:
    folder = cache_root() / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    settings = read_pip_settings()
    try:
        with exclusive(folder, on_wait=lambda: None), Transport(settings.transport) as transport:
            archive = Fetcher(folder, settings, transport, lambda _: None).obtain(_PACKAGE)
    except UnavailableError as error:
        pytest.skip(f"axe-core is not cached and cannot be fetched: {error}")
    with tarfile.open(archive) as opened:
        member = opened.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


def violations(browser: Browser, source: str) -> list[str]:
    """What is wrong with the page as it is shown now: rule, element, remedy."""
    if not browser.run("return typeof axe === 'object'"):
        browser.run(source)
    found: list[str] = browser.run_async(_RUN)
    return found
