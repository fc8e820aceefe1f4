"""Python package indexes: what the user's pip is configured to use, and the links their pages offer for a wheel.

Reads pip's own answer (`pip config list`, which includes PIP_* variables) so that a mirror, a proxy or a certificate
set up for installing also serves models. Reads PEP 691 JSON and PEP 503 HTML. Downloads nothing large. Called by
fetch.py and pull.py.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import parse_qs, unquote, urljoin, urlsplit, urlunsplit

from tokenmill.checkpoint.sources.aliases import Package
from tokenmill.checkpoint.sources.download import Page, Refused, Transport, TransportSettings, Unreachable

DEFAULT_INDEX = "https://pypi.org/simple"
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


@dataclass(frozen=True, slots=True)
class PipSettings:
    indexes: tuple[str, ...] = (DEFAULT_INDEX,)
    find_links: tuple[str, ...] = ()  # folders, pages or single wheels
    transport: TransportSettings = field(default_factory=TransportSettings)


@dataclass(frozen=True, slots=True)
class Link:
    url: str
    sha256: str = ""  # as the page advertises it, if it does


def pip_command() -> list[str]:
    """How to run pip here; empty where there is none."""
    if find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    executable = shutil.which("pip")
    return [executable] if executable else []


def read_pip_settings() -> PipSettings:
    options = {
        name[4:].lower().replace("_", "-"): value for name, value in os.environ.items() if name.startswith("PIP_")
    }
    if command := pip_command():
        listing = subprocess.run([*command, "config", "list"], capture_output=True, text=True, timeout=60, check=False)
        if listing.returncode == 0:
            options = parse_pip_config(listing.stdout)
    return settings_from(options, os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL") or DEFAULT_INDEX)


def parse_pip_config(listing: str) -> dict[str, str]:
    """`section.name='value'` lines, later sections over earlier ones as for `pip download`."""
    sections: dict[str, dict[str, str]] = {"global": {}, "download": {}, ":env:": {}}
    for line in listing.splitlines():
        matched = re.match(r"(global|download|:env:)\.([^=]+)=(.*)$", line)
        if matched:
            sections[matched[1]][matched[2]] = str(ast.literal_eval(matched[3]))
    return {name: value for section in sections.values() for name, value in section.items() if value}


def settings_from(options: Mapping[str, str], default_index: str) -> PipSettings:
    indexes = [options.get("index-url", default_index), *options.get("extra-index-url", "").split()]
    switched_off = options.get("no-index", "").lower() in ("1", "true", "yes", "on")
    timeout = options.get("timeout") or options.get("default-timeout") or "15"
    return PipSettings(
        indexes=() if switched_off else tuple(indexes),
        find_links=tuple(options.get("find-links", "").split()),
        transport=TransportSettings(
            cert=options.get("cert", ""),
            client_cert=options.get("client-cert", ""),
            proxy=options.get("proxy", ""),
            timeout=float(timeout) if re.fullmatch(r"\d+(\.\d+)?", timeout) else 15.0,
            trusted_hosts=frozenset(options.get("trusted-host", "").split()),
        ),
    )


def wheel_links(
    package: Package, settings: PipSettings, transport: Transport, failures: list[Exception]
) -> Iterator[Link]:
    """Places that offer the wheel, nearest first. Lazy: the next index is asked only if the last link was of no use."""
    for location in settings.find_links:
        folder = Path(location.removeprefix("file://")).expanduser()
        if folder.is_dir():
            if (folder / package.filename).is_file():
                yield Link((folder / package.filename).absolute().as_uri())
        else:
            yield from _page_links(
                location if "://" in location else folder.absolute().as_uri(), package, transport, failures
            )
    name = re.sub(r"[-_.]+", "-", package.name).lower()
    for index in settings.indexes:
        yield from _page_links(f"{index.rstrip('/')}/{name}/", package, transport, failures)


def parse_page(page: Page) -> Iterator[tuple[str, Link]]:
    """(file name, link) of everything a page offers; relative links are made absolute."""
    if "json" in page.content_type:
        for entry in json.loads(page.body).get("files", []):
            yield entry["filename"], Link(urljoin(page.url, entry["url"]), entry.get("hashes", {}).get("sha256", ""))
        return
    anchors = _Anchors()
    anchors.feed(page.body.decode("utf-8", errors="replace"))
    for target in anchors.targets:
        parts = urlsplit(urljoin(urljoin(page.url, anchors.base), target))
        sha256 = parse_qs(parts.fragment).get("sha256", [""])[0]
        yield unquote(parts.path.rsplit("/", 1)[-1]), Link(urlunsplit(parts._replace(fragment="")), sha256)


def _page_links(url: str, package: Package, transport: Transport, failures: list[Exception]) -> list[Link]:
    try:
        page = transport.page(url, _ACCEPT)
        links = [link for filename, link in parse_page(page) if filename == package.filename]
    except (Refused, Unreachable) as error:
        failures.append(error)
        return []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        failures.append(Refused(f"{urlsplit(url).hostname}: not an index page ({error})"))
        return []
    return [Link(_with_login(link.url, url), link.sha256) for link in links]


def _with_login(url: str, index: str) -> str:
    """Links to the index's own host use the login that its URL carries, as pip does."""
    login, _, host = urlsplit(index).netloc.rpartition("@")
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{login}@{host}")) if login and parts.netloc == host else url


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.base = ""
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = dict(attrs).get("href")
        if tag == "base" and target and not self.base:
            self.base = target
        elif tag == "a" and target:
            self.targets.append(target)
