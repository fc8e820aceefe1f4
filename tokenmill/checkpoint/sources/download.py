"""Bytes over HTTP (or file://): small pages, and large files that continue where they were cut.

Knows URLs, certificates and proxies, and nothing about models or indexes. Called by the index readers and fetch.py.
A large file grows as `<name>.part` and takes its name only when size and sha256 are right.
"""

from __future__ import annotations

import hashlib
import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import url2pathname

from tokenmill.errors import UserError
from tokenmill.log import get_logger

if TYPE_CHECKING:
    import httpx

CHUNK = 1 << 20
CONNECT_SECONDS = 5.0
MAX_CUTS = 5  # a connection that keeps breaking is continued this often in one call; the next call continues again
_log = get_logger(__name__)


class Unreachable(Exception):
    """No network, no such host, nobody listening, or the connection broke."""


class Refused(Exception):
    """The server answered, but not with the requested file."""


class Corrupt(Exception):
    """The download is complete, but its hash is not the expected one."""


@dataclass(frozen=True, slots=True)
class TransportSettings:
    cert: str = ""  # CA bundle (file or directory) instead of the system's
    client_cert: str = ""
    proxy: str = ""  # instead of HTTPS_PROXY and its kin
    timeout: float = 15.0  # seconds of silence that end a transfer
    trusted_hosts: frozenset[str] = frozenset()  # host or host:port whose certificate is not checked


@dataclass(frozen=True, slots=True)
class Page:
    url: str  # after redirects
    content_type: str
    body: bytes


class Transport:
    """HTTP clients made on first use; a context manager so that their connections are closed."""

    def __init__(self, settings: TransportSettings) -> None:
        self._settings = settings
        self._clients: dict[bool, httpx.Client] = {}

    def __enter__(self) -> Transport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients.values():
            client.close()

    def page(self, url: str, accept: str) -> Page:
        if url.startswith("file:"):
            return _local_page(url)
        with self._stream(url, {"Accept": accept}) as response:
            _require_success(response, url)
            return Page(str(response.url), response.headers.get("content-type", ""), response.read())

    def fetch(self, url: str, destination: Path, size: int, sha256: str, advance: Callable[[int], None]) -> None:
        """Complete `destination`. Bytes that an earlier call left in its `.part` are not requested again."""
        part = destination.with_name(destination.name + ".part")
        for cut in range(MAX_CUTS + 1):
            have = part.stat().st_size if part.exists() else 0
            try:
                if have < size:
                    self._continue(url, part, have, size, advance)
                break
            except Unreachable:
                if cut == MAX_CUTS or not part.exists() or part.stat().st_size <= have:
                    raise
                _log.info("connection to %s broke, continuing", shown(url))
        got, digest = part.stat().st_size, file_sha256(part)
        if (got, digest) != (size, sha256):
            part.unlink()
            advance(-got)
            raise Corrupt(f"{shown(url)} has {got} bytes with sha256 {digest}, expected {size} bytes with {sha256}")
        os.replace(part, destination)

    def _continue(self, url: str, part: Path, have: int, size: int, advance: Callable[[int], None]) -> None:
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        with self._stream(url, headers) as response:
            if response.status_code == 416:
                part.unlink()
                advance(-have)
                raise Corrupt(f"{shown(url)} ends before the {have} bytes that came earlier, expected {size}")
            _require_success(response, url)
            continues = response.headers.get("content-range", "").startswith(f"bytes {have}-")
            if have and not (response.status_code == 206 and continues):
                advance(-have)  # the server sends the whole file again
                have = 0
            declared = response.headers.get("content-length", "")
            if declared.isdigit() and have + int(declared) != size:
                part.unlink(missing_ok=True)
                advance(-have)
                raise Corrupt(f"{shown(url)} has {have + int(declared)} bytes, expected {size}")
            with open(part, "r+b" if have else "wb") as out:
                out.seek(have)
                for chunk in response.iter_raw():  # as they come: a larger buffer would be lost when the line breaks
                    have += len(chunk)
                    if have > size:
                        raise Corrupt(f"{shown(url)} sends more than the expected {size} bytes")
                    out.write(chunk)
                    advance(len(chunk))
        if have < size:
            raise Unreachable(f"{urlsplit(url).hostname} (it stopped after {have} of {size} bytes)")

    @contextmanager
    def _stream(self, url: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        import httpx

        try:
            with self._client(url).stream("GET", url, headers=headers) as response:
                yield response
        except (httpx.TransportError, httpx.InvalidURL, httpx.TooManyRedirects) as error:
            reason = str(error) or type(error).__name__
            if "CERTIFICATE" in reason or not isinstance(error, httpx.TransportError):
                raise Refused(f"{shown(url)}: {reason}") from error
            if isinstance(error, httpx.UnsupportedProtocol):
                raise Refused(f"{shown(url)}: {reason}") from error
            raise Unreachable(f"{urlsplit(url).hostname} ({reason})") from error

    def _client(self, url: str) -> httpx.Client:
        import httpx

        address = urlsplit(url)
        host = address.hostname or ""
        verify = not {host, f"{host}:{address.port}"} & self._settings.trusted_hosts
        if verify not in self._clients:
            self._clients[verify] = httpx.Client(
                verify=_ssl_context(self._settings) if verify else False,
                proxy=self._settings.proxy or None,
                timeout=httpx.Timeout(self._settings.timeout, connect=min(CONNECT_SECONDS, self._settings.timeout)),
                follow_redirects=True,
            )
        return self._clients[verify]


def shown(url: str) -> str:
    """The URL without its user, password and fragment, fit for messages."""
    scheme, host, path, query, _ = urlsplit(url)
    return urlunsplit((scheme, host.rsplit("@", 1)[-1], path, query, ""))


def file_path(url: str) -> Path:
    return Path(url2pathname(unquote(urlsplit(url).path)))


def file_sha256(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _local_page(url: str) -> Page:
    path = file_path(url)
    if path.is_dir():
        path, url = path / "index.html", url.rstrip("/") + "/index.html"
    if not path.is_file():
        raise Refused(f"{shown(url)}: no such file")
    return Page(url, "text/html", path.read_bytes())


def _require_success(response: httpx.Response, url: str) -> None:
    if not response.is_success:
        raise Refused(f"{shown(url)}: HTTP {response.status_code}")


def _ssl_context(settings: TransportSettings) -> ssl.SSLContext:
    import certifi

    names = ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE")
    bundle = settings.cert or next((os.environ[name] for name in names if os.environ.get(name)), "")
    try:
        if bundle:
            directory = os.path.isdir(bundle)
            context = ssl.create_default_context(
                cafile=None if directory else bundle, capath=bundle if directory else None
            )
        else:
            context = ssl.create_default_context()
            context.load_verify_locations(certifi.where())
        if settings.client_cert:
            context.load_cert_chain(settings.client_cert)
    except OSError as error:
        raise UserError(
            f"cannot load the certificates '{bundle or settings.client_cert}': {error}",
            "correct PIP_CERT, REQUESTS_CA_BUNDLE or SSL_CERT_FILE",
        ) from error
    return context
