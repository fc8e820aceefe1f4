"""A server that runs already, given as a URL: whatever engine it is."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from tokenmill.optimize.rivals.base import Rival, RivalWorkload
from tokenmill.optimize.rivals.process import RunningServer

_ANSWER_SECONDS = 60.0


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


class UrlRival(Rival):
    engine = ""

    def __init__(self, url: str, api_key: str = "") -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._api_key = api_key
        self.name = urlsplit(self._url).netloc

    def missing(self) -> str:
        return ""

    def version(self) -> str:
        return self._url

    def serves(self, path: Path) -> str:  # noqa: ARG002
        return ""  # what it serves is its own; the quality says how far that is from the reference

    def start(self, path: Path, workload: RivalWorkload, log: Path | None = None) -> RunningServer:  # noqa: ARG002
        seconds = min(_ANSWER_SECONDS, workload.ready_seconds)
        return RunningServer((), self._url, api_key=self._api_key, ready_seconds=seconds)
