"""A long run of misbehaving clients against one server; ends with a verdict and exit code 0 or 1.

    python benchmarks/soak.py smollm2 [--clients 64] [--seconds 300] [--seed 0] [--json]

Clients stream, wait, cancel, read slowly, hang up, send bad JSON, bad schemas and prompts that are too long. It must
hold that every request gets an answer (or was left by its own client), that pages and requests return to zero with the
page invariant intact, that memory of both processes stays flat, and that the server answers as it did before. KV memory
is small, so that pages are evicted and sequences preempted, and all of it has been touched early in the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.server_process import started_server

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
_CONTEXT = 1024
_REFUSED = (429,)  # a full queue may refuse any request
_PROBE = {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
_FLAT = 1.15  # memory at the end against memory after the first third


class Soak:
    def __init__(self, http: httpx.AsyncClient, seconds: float) -> None:
        self._http = http
        self._end = time.monotonic() + seconds
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []

    async def client(self, seed: int) -> None:
        choose = random.Random(seed)
        acts: list[Callable[[random.Random], Awaitable[None]]] = [
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
                await act(choose)
            except httpx.HTTPError as error:
                self.problems.append(f"{act.__name__}: no answer, {type(error).__name__} {error}")
                await asyncio.sleep(0.5)

    def _body(self, choose: random.Random, **extra: Any) -> dict[str, Any]:
        prompt = " ".join(choose.choices(_WORDS, k=choose.randint(1, 120)))
        return {"prompt": prompt, "max_tokens": choose.randint(1, 48), "n": choose.choice((1, 1, 1, 2)), **extra}

    async def _check(self, act: str, answer: httpx.Response, *expected: int) -> None:
        self.outcomes[f"{act} {answer.status_code}"] += 1
        if answer.status_code not in (*expected, *_REFUSED):
            self.problems.append(f"{act}: status {answer.status_code}")
        if answer.status_code in _REFUSED:
            await asyncio.sleep(0.5)  # a refused client comes back later

    async def _whole(self, choose: random.Random) -> None:
        await self._check("whole", await self._http.post("/v1/completions", json=self._body(choose)), 200)

    async def _streamed(self, choose: random.Random, pause: float = 0.0) -> None:
        done = False
        async with self._http.stream("POST", "/v1/completions", json=self._body(choose, stream=True)) as answer:
            async for line in answer.aiter_lines():
                done = done or line == "data: [DONE]"
                if line.startswith('data: {"error"'):
                    self.problems.append(f"stream: {line[:200]}")
                if pause:
                    await asyncio.sleep(pause)
        await self._check("streamed", answer, 200)
        if answer.status_code == 200 and not done:
            self.problems.append("a stream ended without [DONE]")

    async def _slow(self, choose: random.Random) -> None:
        await self._streamed(choose, pause=0.05)

    async def _leave(self, choose: random.Random) -> None:
        left = choose.randint(0, 6)
        async with self._http.stream("POST", "/v1/completions", json=self._body(choose, stream=True)) as answer:
            async for _ in answer.aiter_lines():
                left -= 1
                if left < 0:
                    break
        self.outcomes["left a stream"] += 1

    async def _give_up(self, choose: random.Random) -> None:
        try:
            await self._http.post("/v1/completions", json=self._body(choose), timeout=choose.uniform(0.01, 0.5))
        except httpx.TimeoutException:
            self.outcomes["gave up waiting"] += 1

    async def _bad_body(self, choose: random.Random) -> None:
        headers = {"content-type": "application/json"}
        content = choose.choice(_BAD_BODIES)
        await self._check("bad body", await self._http.post("/v1/completions", content=content, headers=headers), 400)

    async def _bad_schema(self, choose: random.Random) -> None:
        form = {
            "type": "json_schema",
            "json_schema": {"name": "x", "strict": True, "schema": choose.choice(_BAD_SCHEMAS)},
        }
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "response_format": form}
        await self._check("bad schema", await self._http.post("/v1/chat/completions", json=body), 400)

    async def _schema(self, choose: random.Random) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": _GOOD_SCHEMA}}
        message = {"role": "user", "content": f"How old is a {choose.choice(_WORDS)}? Answer in JSON."}
        body = {"messages": [message], "max_tokens": 24, "response_format": form}
        answer = await self._http.post("/v1/chat/completions", json=body)
        await self._check("schema", answer, 200)
        choice = answer.json()["choices"][0] if answer.status_code == 200 else {}
        if choice.get("finish_reason") == "stop":
            value = json.loads(choice["message"]["content"])
            if not isinstance(value.get("age"), int):
                self.problems.append(f"an answer breaks its schema: {value}")

    async def _too_long(self, choose: random.Random) -> None:
        body = self._body(choose) | {"prompt": "dog " * (2 * _CONTEXT)}
        await self._check("too long", await self._http.post("/v1/completions", json=body), 400)


async def soak(url: str, pid: int, options: argparse.Namespace) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=options.clients)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        before = (await http.post("/v1/completions", json=_PROBE)).json()["choices"][0]["text"]
        run = Soak(http, options.seconds)
        memory: list[int] = []
        watching = asyncio.create_task(_watch_memory(http, pid, memory))
        await asyncio.gather(*(run.client(options.seed * 1000 + number) for number in range(options.clients)))
        watching.cancel()
        load = await _until_idle(http)
        metrics = (await http.get("/metrics")).text
        after = (await http.post("/v1/completions", json=_PROBE)).json()["choices"][0]["text"]
    third = memory[len(memory) // 3] if memory else 0
    last = memory[-1] if memory else 0
    checks = {
        "every_request_answered": not run.problems,
        "nothing_left_in_flight": not (load["server_load"] or load["queued_requests"] or load["requests_running"]),
        "no_page_held": load["kv_pages_held"] == 0,
        "pages_consistent": bool(load["kv_pages_consistent"]),
        "memory_flat": last <= _FLAT * third,
        "no_5xx": 'status="5' not in metrics,
        "same_answer_as_before": before == after,
    }
    return {
        "ok": all(checks.values()),
        "clients": options.clients,
        "seconds": options.seconds,
        "requests": sum(run.outcomes.values()),
        "checks": checks,
        "outcomes": dict(sorted(run.outcomes.items())),
        "problems": dict(Counter(run.problems).most_common(10)),
        "rss_bytes_third": third,
        "rss_bytes_end": last,
    }


async def _watch_memory(http: httpx.AsyncClient, pid: int, samples: list[int]) -> None:
    """Resident memory of the server and its engine, once a second."""
    while True:
        engine = (await http.get("/load")).json()["engine_pid"]
        samples.append(sum(_resident(each) for each in (pid, engine) if each))
        await asyncio.sleep(1)


def _resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * 4096


async def _until_idle(http: httpx.AsyncClient) -> dict[str, Any]:
    for _ in range(100):
        load: dict[str, Any] = (await http.get("/load")).json()
        if not load["server_load"] and not load["kv_pages_held"]:
            break
        await asyncio.sleep(0.2)
    return load


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    flags = (
        "--context",
        str(_CONTEXT),
        "--concurrency",
        "16",
        "--max-num-queued-reqs",
        "32",
        "--quiet",
        "--memory",
        "160MiB",
    )
    with started_server(options.model, *flags) as server:
        result = asyncio.run(soak(server.url, server.pid, options))
        if not result["ok"]:
            result["log"] = server.log.read_text()[-4000:]
    print(json.dumps(result, indent=None if options.json else 1))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
