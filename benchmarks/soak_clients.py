"""Clients that misbehave in every ordinary way, for soak.py; each request is classified by how it ended.

They stream, wait, cancel, read slowly, hang up, send bad JSON, bad schemas and prompts that are too long. Under chaos
(`tolerant`) a clean error is an answer too: a JSON refusal with a time to come back, or an error event before [DONE].
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

_WORDS = ("the", "dog", "saw", "a", "cat", "and", "ran", "to", "see", "why", "it", "was", "not", "there", "so", "we")
_BAD_BODIES = (
    b"{",
    b"[]",
    b'{"prompt": 5}',
    b'{"prompt": "x", "n": -1}',
    b"\xff\xfe",
    b'{"prompt": "x", "max_tokens": 0}',
)
_BAD_SCHEMAS: tuple[Any, ...] = ({"type": "nothing"}, {"$ref": "#/missing"}, {"type": "string", "pattern": "("}, "text")
_GOOD_SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
CONTEXT = 1024
PROBE = {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0, "ignore_eos": True}


class SoakClients:
    """What all clients share: the clock, the counts and the problems."""

    def __init__(self, seconds: float, tolerant: bool = False) -> None:
        self._end = time.monotonic() + seconds
        self._clean = (429, 503) if tolerant else (429,)  # a full queue may refuse any request
        self._tolerant = tolerant
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []

    async def run(self, http: httpx.AsyncClient, seed: int, *, stalls: bool = False) -> None:
        """One client until the time is over. `stalls`: its network does, so that a lost connection is no problem."""
        choose = random.Random(seed)
        acts: list[Callable[[httpx.AsyncClient, random.Random], Awaitable[None]]] = [
            self._whole,
            self._streamed,
            self._streamed,
            self._slow,
            self._leave,
            self._give_up,
            self._bad_body,
            self._bad_schema,
            self._schema,
            self._too_long,
        ]
        while time.monotonic() < self._end:
            act = choose.choice(acts)
            try:
                await act(http, choose)
            except httpx.HTTPError as error:
                if stalls:
                    self.outcomes["cut off by a stalled network"] += 1
                else:
                    self.problems.append(f"{act.__name__}: no answer, {type(error).__name__} {error}")
                await asyncio.sleep(0.5)

    def _body(self, choose: random.Random, **extra: Any) -> dict[str, Any]:
        prompt = " ".join(choose.choices(_WORDS, k=choose.randint(1, 120)))
        return {"prompt": prompt, "max_tokens": choose.randint(1, 48), "n": choose.choice((1, 1, 1, 2)), **extra}

    async def _check(self, act: str, answer: httpx.Response, *expected: int) -> None:
        self.outcomes[f"{act} {answer.status_code}"] += 1
        if answer.status_code not in (*expected, *self._clean):
            self.problems.append(f"{act}: status {answer.status_code}")
        if answer.status_code in self._clean:
            if self._tolerant and not _is_clean(answer):
                self.problems.append(f"{act}: {answer.status_code} without an error object or retry-after")
            await asyncio.sleep(0.5)  # a refused client comes back later

    async def _whole(self, http: httpx.AsyncClient, choose: random.Random) -> None:
        await self._check("whole", await http.post("/v1/completions", json=self._body(choose)), 200)

    async def _streamed(self, http: httpx.AsyncClient, choose: random.Random, pause: float = 0.0) -> None:
        done = failed = False
        async with http.stream("POST", "/v1/completions", json=self._body(choose, stream=True)) as answer:
            if answer.status_code != 200:
                await answer.aread()
            else:
                async for line in answer.aiter_lines():
                    done = done or line == "data: [DONE]"
                    if line.startswith('data: {"error"'):
                        failed = True
                        if not self._tolerant:
                            self.problems.append(f"stream: {line[:200]}")
                    if pause:
                        await asyncio.sleep(pause)
        await self._check("streamed", answer, 200)
        if failed:
            self.outcomes["a stream ended with an error event"] += 1
        if answer.status_code == 200 and not done:
            self.problems.append("a stream ended without [DONE]")

    async def _slow(self, http: httpx.AsyncClient, choose: random.Random) -> None:
        await self._streamed(http, choose, pause=0.05)

    async def _leave(self, http: httpx.AsyncClient, choose: random.Random) -> None:
        left = choose.randint(0, 6)
        async with http.stream("POST", "/v1/completions", json=self._body(choose, stream=True)) as answer:
            async for _ in answer.aiter_lines():
                left -= 1
                if left < 0:
                    break
        self.outcomes["left a stream"] += 1

    async def _give_up(self, http: httpx.AsyncClient, choose: random.Random) -> None:
        try:
            await http.post("/v1/completions", json=self._body(choose), timeout=choose.uniform(0.01, 0.5))
        except httpx.TimeoutException:
            self.outcomes["gave up waiting"] += 1

    async def _bad_body(self, http: httpx.AsyncClient, choose: random.Random) -> None:
        headers = {"content-type": "application/json"}
        content = choose.choice(_BAD_BODIES)
        await self._check("bad body", await http.post("/v1/completions", content=content, headers=headers), 400, 422)

    async def _bad_schema(self, http: httpx.AsyncClient, choose: random.Random) -> None:
        form = {
            "type": "json_schema",
            "json_schema": {"name": "x", "strict": True, "schema": choose.choice(_BAD_SCHEMAS)},
        }
        body = {"prompt": "Hi", "max_tokens": 8, "response_format": form}
        await self._check("bad schema", await http.post("/v1/completions", json=body), 400)

    async def _schema(self, http: httpx.AsyncClient, choose: random.Random) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": _GOOD_SCHEMA}}
        prompt = f"How old is a {choose.choice(_WORDS)}? Answer in JSON."
        body = {"prompt": prompt, "max_tokens": 24, "response_format": form}
        answer = await http.post("/v1/completions", json=body)
        await self._check("schema", answer, 200)
        choice = answer.json()["choices"][0] if answer.status_code == 200 else {}
        if choice.get("finish_reason") == "stop":
            value = json.loads(choice["text"])
            if not isinstance(value.get("age"), int):
                self.problems.append(f"an answer breaks its schema: {value}")

    async def _too_long(self, http: httpx.AsyncClient, choose: random.Random) -> None:
        body = self._body(choose) | {"prompt": "dog " * (2 * CONTEXT)}
        await self._check("too long", await http.post("/v1/completions", json=body), 400, 413)


def _is_clean(answer: httpx.Response) -> bool:
    """A refusal that says why and when to come back."""
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return bool(error.get("message")) and "retry-after" in answer.headers
