"""The built-in web pages at `/` and `/docs`, and how a browser brings a key: in a header that the page at `/` sets, or
by Basic authentication with the key as its password.

Nothing comes from other sites, and the security policies of the pages allow nothing else. The page at `/` and its
parts are the same for everybody and hold no data, so they need no key: the page asks for one. `/docs` needs it like any
route. A browser sends Basic credentials along with requests that other sites cause, so such requests do not count as
authenticated.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from importlib.resources import files

from fastapi import FastAPI, Request
from starlette.datastructures import Headers
from starlette.responses import Response

from tokenmill.serve.service import Service

_REALM = 'realm="tokenmill: any name, the API key as password", charset="UTF-8"'
_OWN_SITE = ("same-origin", "none")  # "none": the user typed the address
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_STATIC = files("tokenmill.serve").joinpath("static")
_PARTS = {f"/page/{each.name}": each for each in _STATIC.joinpath("page").iterdir() if each.name[0] != "."}
OPEN_PAGES = frozenset({"/", *_PARTS})  # without a key
# Scripts and styles of this server only, no markup made from text (trusted types), nothing else, in no frame.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


def add_page_routes(app: FastAPI, _service: Service) -> None:
    text = _STATIC.joinpath("index.html").read_text(encoding="utf-8")
    if prefix := app.root_path.rstrip("/"):  # an address without its last slash would look for the parts above it
        text = text.replace('="page/', f'="{prefix}/page/')
    _add_file(app, "/", text.encode(), "text/html", _POLICY)
    for path, part in _PARTS.items():
        _add_file(app, path, part.read_bytes(), _TYPES[path[path.rindex(".") :]])
    document = _STATIC.joinpath("docs.html").read_text(encoding="utf-8")
    _add_file(app, "/docs", document.encode(), "text/html", _inline_policy(document))


def _add_file(app: FastAPI, path: str, content: bytes, media_type: str, policy: str | None = None) -> None:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {"cache-control": "no-cache", "etag": tag}
    if policy is not None:
        headers["content-security-policy"] = policy

    @app.get(path, include_in_schema=False)
    async def file(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)


def challenge(headers: Headers) -> str:
    """How to bring a key, for a 401. A browser opens its own dialog for Basic; scripts of pages ask by themselves."""
    return f"{'Basic' if headers.get('sec-fetch-mode', 'navigate') == 'navigate' else 'Bearer'} {_REALM}"


def basic_key(headers: Headers) -> str | None:
    """The password of Basic credentials, unless another site made the browser send them."""
    scheme, _, encoded = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic" or headers.get("sec-fetch-site", "none") not in _OWN_SITE:
        return None
    try:
        pair = base64.b64decode(encoded.strip(), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
    return pair.partition(":")[2] or None


def _inline_policy(page: str) -> str:
    """For a page of one file: only its own script and style run; it talks to its own server and cannot be framed."""

    def allowed(tag: str) -> str:
        content = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"

    return (
        f"default-src 'none'; script-src {allowed('script')}; style-src {allowed('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
