"""One replica as it is now: follows the events and the load of its models, knows whether it takes requests.

A long poll for each model brings the changes of its cached pages in order, with a load report (feed.py); the first
model's also says which others there are, and is the sign of life. A server that has no such events is watched by
/health, and gets requests by load alone. Silence makes it unusable, and after a while dead: then what waits for it is
told to go elsewhere. Nothing here changes the load of open requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from typing import Any

import httpx

from tokenmill.log import get_logger
from tokenmill.route.config import RouteConfig
from tokenmill.route.feed import ModelFeed, ServedModel, page_name, total_load
from tokenmill.route.prompt import PageRoot
from tokenmill.route.target import Target

_log = get_logger(__name__)
_POLL_SECONDS = 0.5
_RETRY_SECONDS = 0.2
_MODELS_SECONDS = 5.0
_ROOT_SECONDS = 2.0
_MAX_ROOTS = 10_000  # callers whose roots are remembered
_ERRORS = (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError, KeyError, TypeError)


class Replica(Target):
    def __init__(self, number: int, url: str, http: httpx.AsyncClient, config: RouteConfig) -> None:
        super().__init__(number, time.monotonic)
        self.url = url
        self.up = False
        self.state = "not reached yet"
        self.draining = False
        self.full_until = 0.0  # it refused a request: others first, until then
        self.models: frozenset[str] = frozenset()
        self.num_gaps = 0
        self.legs: set[asyncio.Timeout] = set()  # of requests that wait for it
        self._http = http
        self._headers = {"authorization": f"Bearer {config.replica_key}"} if config.replica_key else {}
        self._dead_after = config.dead_after
        self._first = ModelFeed(None, self.pages)
        self._others: dict[str, tuple[ModelFeed, asyncio.Task[None]]] = {}  # by the name of the model
        self._follows = True  # whether it has events
        self._last_sign = time.monotonic()
        self._models_read = -_MODELS_SECONDS
        self._roots: dict[bytes, PageRoot] = {}

    @property
    def usable(self) -> bool:
        return self.up and not self.draining

    def serves(self, model: str | None) -> bool:
        return model is None or model in self.models

    def takes(self, model: str | None) -> bool:
        """Whether a request for this model may go there now: its engine may be away, though others are not."""
        feed = self._feed_of(model)
        return self.usable and (not self._follows or feed is None or feed.takes_requests)

    def served(self, model: str | None) -> ServedModel | None:
        """How prompts for it are tokenized; those of an adapter as its first model's."""
        return (self._feed_of(model) or self._first).model

    @property
    def known_models(self) -> list[ServedModel]:
        return [feed.model for feed in self._feeds if feed.model is not None]

    @property
    def _feeds(self) -> list[ModelFeed]:
        return [self._first, *(feed for feed, _ in self._others.values())]

    def _feed_of(self, model: str | None) -> ModelFeed | None:
        """None where the name is none of a model: an adapter's, or nothing's."""
        if model is None:
            return self._first
        return next((each for each in self._feeds if each.model is not None and model in each.model.names), None)

    # --- following ---

    async def follow(self) -> None:
        """For ever: keep what is known of it up to date."""
        try:
            while True:
                try:
                    async with asyncio.timeout(self._dead_after):  # wait_for of Python 3.11 may lose a cancellation
                        await self._look()
                    self._last_sign = time.monotonic()
                except _ERRORS as error:
                    self._on_silence(error)
                    await asyncio.sleep(_RETRY_SECONDS)
                self.pages.drop_expired()
        finally:
            self._follow_models([])

    async def _look(self) -> None:
        if time.monotonic() - self._models_read > _MODELS_SECONDS:
            answer = await self._http.get(f"{self.url}/v1/models", headers=self._headers)
            if answer.status_code == 200:
                self.models = frozenset(str(each["id"]) for each in answer.json()["data"])
            self._models_read = time.monotonic()
        if not self._follows:
            await self._look_at_health()
            return
        if not await self._ask(self._first):
            _log.warning("%s does not let its events be read: it gets requests by load alone", self.url)
            self._follows = False

    async def _ask(self, feed: ModelFeed) -> bool:
        """Wait for what a model tells; False if there is nothing to be told."""
        wait = min(_POLL_SECONDS, self._dead_after / 4) if self.up else 0.0
        url = f"{self.url}/v1/replica/events"
        answer = await self._http.get(url, params=feed.query(wait), headers=self._headers)
        if answer.status_code in (401, 403, 404):
            return False
        answer.raise_for_status()
        self.take_events(answer.json(), feed)
        if not feed.root:  # none yet, or a model without pages: the answer did not wait
            await asyncio.sleep(wait)
        return True

    def take_events(self, told: dict[str, Any], feed: ModelFeed) -> None:
        """An answer of the replica. Raises KeyError, TypeError or ValueError if it makes no sense."""
        is_new, is_gap = feed.take(told)
        self.num_gaps += is_gap
        if is_new:
            self._roots.clear()
            self._models_read = -_MODELS_SECONDS
        if feed is self._first:
            self.root, self.page_size = feed.root, feed.page_size
            self._follow_models([str(name) for name in told.get("models", ())][1:])
        self.take(total_load(self._feeds))
        able = next((each for each in self._feeds if each.takes_requests), None)
        self._set_up(able is not None, (able or feed).state)

    def _follow_models(self, names: list[str]) -> None:
        """Just these, beside the first."""
        for name in [name for name in self._others if name not in names]:
            feed, task = self._others.pop(name)
            task.cancel()
            feed.forget()
        for name in names:
            if name not in self._others:
                feed = ModelFeed(name, self.pages)
                self._others[name] = feed, asyncio.create_task(self._follow_model(feed), name=f"{self.url} {name}")

    async def _follow_model(self, feed: ModelFeed) -> None:
        """Until it is cancelled; the first model's events tell whether the replica lives."""
        while True:
            try:
                async with asyncio.timeout(self._dead_after):
                    told = await self._ask(feed)
            except _ERRORS:
                told = False
                feed.start_over()
            if not told:
                await asyncio.sleep(_RETRY_SECONDS)

    async def _look_at_health(self) -> None:
        answer = await self._http.get(f"{self.url}/health", headers=self._headers)
        self._set_up(answer.status_code == 200, "ready" if answer.status_code == 200 else f"{answer.status_code}")
        await asyncio.sleep(min(_POLL_SECONDS, self._dead_after / 4))

    def _set_up(self, up: bool, state: str) -> None:
        if up != self.up:
            _log.warning("%s is %s (%s)", self.url, "up" if up else "down", state)
        self.up, self.state = up, state

    def on_unreachable(self) -> None:
        """A request could not connect: nothing is sent there until the next look succeeds."""
        self._set_up(False, "not reachable")

    def _on_silence(self, error: Exception) -> None:
        self._set_up(False, f"{type(error).__name__}: {error}"[:200])
        for feed in self._feeds:
            feed.start_over()
        refused = isinstance(error, httpx.ConnectError)  # nobody listens: its process is gone
        if self.legs and (refused or time.monotonic() - self._last_sign >= self._dead_after):
            _log.warning("%s is dead: %d requests go elsewhere", self.url, len(self.legs))
            now = asyncio.get_running_loop().time()
            for leg in list(self.legs):
                with contextlib.suppress(RuntimeError):  # it ended meanwhile
                    leg.reschedule(now)

    # --- names of a caller's pages ---

    async def root_of(self, headers: dict[str, str], model: str | None, cache_salt: str) -> PageRoot:
        """Where the names of a caller's pages begin; empty if that is not known. `headers`: with the caller's key."""
        feed = self._feed_of(model)
        if feed is not None and (not feed.root or not (headers or cache_salt)):
            return feed.root, feed.page_size
        if not self._follows:
            return b"", 0
        parts = (*headers.values(), model or "", cache_salt)
        caller = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).digest()
        if caller not in self._roots:
            query = {"cache_salt": cache_salt, **({} if model is None else {"model": model})}
            try:
                async with asyncio.timeout(_ROOT_SECONDS):
                    answer = await self._http.get(f"{self.url}/v1/replica/root", params=query, headers=headers)
                told = answer.json() if answer.status_code == 200 else {"root": ""}
                found = page_name(told["root"]), int(told.get("page_size", self.page_size))
            except _ERRORS:
                return b"", 0
            if len(self._roots) >= _MAX_ROOTS:
                self._roots.clear()
            self._roots[caller] = found
        return self._roots[caller]
