"""The built-in web pages at `/` and `/docs`, and how a browser brings a key: Basic authentication with the key as its
password.

Each page is one file without outside resources, and its security policy allows nothing else. A browser sends Basic
credentials along with requests that other sites cause, so such requests do not count as authenticated.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from importlib.resources import files

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.responses import Response

from tokenmill.serve.service import Service

CHALLENGE = 'Basic realm="tokenmill: any name, the API key as password", charset="UTF-8"'
_OWN_SITE = ("same-origin", "none")  # "none": the user typed the address


def add_page_routes(app: FastAPI, _service: Service) -> None:
    _add_page(app, "/", "index.html")
    _add_page(app, "/docs", "docs.html")


def _add_page(app: FastAPI, path: str, file: str) -> None:
    text = files("tokenmill.serve").joinpath("static", file).read_text(encoding="utf-8")
    headers = {"content-security-policy": _policy(text), "cache-control": "no-cache"}

    @app.get(path, include_in_schema=False)
    async def page() -> Response:
        return Response(text, headers=headers, media_type="text/html")


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


def _policy(page: str) -> str:
    """Only the page's own script and style run; it talks to its own server only and cannot be framed."""

    def allowed(tag: str) -> str:
        content = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"

    return (
        f"default-src 'none'; script-src {allowed('script')}; style-src {allowed('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
