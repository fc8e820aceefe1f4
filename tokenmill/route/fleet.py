"""The replicas of a router: which of them takes a request, and which are kept out of it.

Canaries get their stated share by chance (by session, where the caller names one), the policy divides the rest. Owns
the tasks that follow the replicas; knows nothing of HTTP exchanges.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Collection
from typing import Any
from zlib import crc32

import httpx

from tokenmill.errors import UserError
from tokenmill.route.config import RouteConfig
from tokenmill.route.policies import POLICIES
from tokenmill.route.policies.base import Policy
from tokenmill.route.prompt import Prompt
from tokenmill.route.replica import Replica

_FULL_SECONDS = 1.0  # that a replica with a full queue is left alone, while others have room
_LOOK_SECONDS = 0.02


class Fleet:
    def __init__(self, config: RouteConfig, http: httpx.AsyncClient) -> None:
        self.replicas = [Replica(number, url, http, config) for number, url in enumerate(config.replica)]
        self.policy: Policy = POLICIES.get(config.policy)()
        self._shares = config.shares()
        self._random = random.Random()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(each.follow(), name=f"follow {each.url}") for each in self.replicas]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def candidates(self, model: str | None, without: Collection[Replica] = ()) -> list[Replica]:
        """Replicas that take requests for a model; all usable ones where none lists it, so that one says so."""
        usable = [each for each in self.replicas if each.takes(model) and each not in without]
        found = [each for each in usable if each.serves(model)]
        if not found and not any(each.serves(model) for each in self.replicas):
            found = usable
        now = time.monotonic()
        return [each for each in found if each.full_until <= now] or found

    def choose(self, prompt: Prompt, model: str | None, without: Collection[Replica] = ()) -> Replica | None:
        found = self.candidates(model, without)
        if not found:
            return None
        return self.policy.choose(prompt, self._share_of(found, prompt.session))

    def _share_of(self, found: list[Replica], session: str) -> list[Replica]:
        """The canary whose share this request falls into, else all that are none."""
        drawn = crc32(session.encode()) / 2**32 if session else self._random.random()
        for each in found:
            share = self._shares.get(each.url)
            if share is not None:
                if drawn < share:
                    return [each]
                drawn -= share
        return [each for each in found if each.url not in self._shares] or found

    def set_full(self, replica: Replica) -> None:
        replica.full_until = time.monotonic() + _FULL_SECONDS

    async def wait_usable(self, model: str | None, deadline: float) -> bool:
        """Whether a replica takes requests before `deadline`, of the monotonic clock."""
        while not self.candidates(model):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(_LOOK_SECONDS)
        return True

    def drain(self, url: str, draining: bool) -> Replica:
        """Send a replica nothing more, or again; what it has, it ends."""
        for each in self.replicas:
            if url.rstrip("/") == each.url or url == str(each.number):
                each.draining = draining
                return each
        raise UserError(f"there is no replica {url[:200]}", "see GET /router/replicas")

    def shown(self) -> list[dict[str, Any]]:
        return [
            {
                "number": each.number,
                "url": each.url,
                "up": each.up,
                "state": each.state,
                "draining": each.draining,
                "outstanding": each.outstanding,
                "waiting_tokens": each.waiting_tokens,
                "pages": len(each.pages.stored),
                "pending": len(each.pages.pending),
                "event_gaps": each.num_gaps,
                "root": each.root.hex(),
                "models": sorted(each.models),
                "wait_seconds": round(each.wait_seconds(1), 6),
            }
            for each in self.replicas
        ]
