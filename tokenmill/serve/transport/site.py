"""Which site a request is meant for, and which site a browser sends it from: the Host and Origin checks.

A server without keys on the loopback address is protected by nothing but being local. A web page could still reach it
through the user's browser, by a name that resolves to 127.0.0.1 (DNS rebinding) or by a cross-origin POST. Pure
functions of headers and options; edge.py asks before a key is looked at.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from tokenmill.serve.errors import ApiError

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_CROSS_SITE = ("cross-site", "same-site")  # another origin, in the words of Sec-Fetch-Site


class SiteCheck:
    """`local`: the server has no keys and listens on the loopback address only."""

    def __init__(self, local: bool, allowed_hosts: Sequence[str], origins: Sequence[str]) -> None:
        self._local = local
        self._allowed_hosts = tuple(name.lower() for name in allowed_hosts)
        self._origins = tuple(origin.lower() for origin in origins)

    def refusal(self, method: str, headers: Mapping[str, str]) -> ApiError | None:
        if not self._local and not self._allowed_hosts:
            return None
        host = headers.get("host", "").lower()
        if not self._serves(host_name(host)):
            return ApiError(
                421,
                f"this server does not serve the host '{_shown(host)}': start it with --allowed-host to add it",
                code="host_not_allowed",
            )
        if self._local and method not in _SAFE_METHODS and not self._same_origin(host, headers):
            return ApiError(
                403,
                "web pages of another origin may not use this server: start it with --cors-origin to allow one",
                code="origin_not_allowed",
            )
        return None

    def _serves(self, name: str) -> bool:
        if self._local and (name == "localhost" or name.endswith(".localhost") or _is_loopback(name)):
            return True
        return any(
            allowed in ("*", name) or (allowed.startswith("*.") and name.endswith(allowed[1:]))
            for allowed in self._allowed_hosts
        )

    def _same_origin(self, host: str, headers: Mapping[str, str]) -> bool:
        """Only browsers send these headers; other clients are not held back."""
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site", "none") not in _CROSS_SITE
        origin = origin.lower()
        return "*" in self._origins or origin in self._origins or origin.partition("://")[2] == host


def host_name(host: str) -> str:
    """The name in a Host header, without port, brackets and trailing dot; "" if it is malformed."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
    return "" if "@" in host else name.removesuffix(".")


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _shown(text: str) -> str:
    return text[:100].encode("ascii", "replace").decode()
