"""Replicas that misbehave on purpose, on real sockets: events that get lost, refusals, streams that break off."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tokenmill.engine.kv.page_names import page_names
from tokenmill.route.app import RouterApp
from tokenmill.route.config import RouteConfig
from tokenmill.route.fleet import Fleet
from tokenmill.route.metrics import RouterMetrics
from tokenmill.route.relay import Relay
from tokenmill.route.texts import Texts

PAGE = 4
VOCAB = 97
_FEEDS = count()


def token(seed: int, position: int) -> int:
    """What every replica answers there: a function of seed and position, as the engine's."""
    return (seed * 31 + position * 7) % VOCAB


class CutError(Exception):
    """Ends a response without its end."""


class FakeReplica:
    def __init__(self, root: bytes = b"root", name: str = "fake", page: int = PAGE) -> None:
        # "", "503", "429", "400", "cut_before", "cut_after", "cut_at_end", "error_event", "hang", "freeze"
        self.behaviour = ""
        self.name, self.page = name, page
        self.others: dict[str, FakeReplica] = {}  # models beside the first: only their events are used
        self.cut_at = 3  # tokens
        self.cut_again = 3  # the same of a stream that is resumed
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.restart(root)
        self.load = {
            "state": "ready",
            "active": 0,
            "slots": 8,
            "waiting": 0,
            "waiting_tokens": 0,
            "prompt_token_seconds": 0.001,
            "service_seconds": 0.5,
            "kv_usage": 0.1,
        }
        self.snapshots = 0
        self.url = ""
        self._server: uvicorn.Server | None = None

    def restart(self, root: bytes) -> None:
        """Another feed, with nothing cached."""
        self.root, self.feed = root, f"feed {next(_FEEDS)}"
        self.names: dict[bytes, bytes] = {}
        self.changes: list[dict[str, Any]] = []
        self.sequence = 0

    def store(self, ids: Sequence[int]) -> None:
        names = page_names(self.root, ids, self.page)
        new = [
            (name, parent) for name, parent in zip(names, [self.root, *names], strict=False) if name not in self.names
        ]
        self.names.update(new)
        self._change([[_text(name), _text(parent)] for name, parent in new], [])

    def remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            del self.names[name]
        self._change([], [_text(name) for name in names])

    def _change(self, stored: list[list[str]], removed: list[str]) -> None:
        self.sequence += 1
        self.changes.append({"sequence": self.sequence, "stored": stored, "removed": removed})

    # --- HTTP ---

    async def events(self, request: Request) -> Response:
        query = request.query_params
        if query.get("model", self.name) != self.name:
            return await self.others[query["model"]].events(request)
        shown: dict[str, Any] = {"feed": self.feed, "root": _text(self.root), "page_size": self.page}
        shown |= {"load": self.load, "models": [self.name, *self.others]}
        if self.behaviour == "silent":
            await asyncio.sleep(60)
        deadline = asyncio.get_running_loop().time() + float(query["wait"])
        while (query["feed"], int(query["after"])) == (self.feed, self.sequence) and self.behaviour != "silent":
            if asyncio.get_running_loop().time() >= deadline:
                break
            await asyncio.sleep(0.01)
        if query["feed"] != self.feed:
            self.snapshots += 1
            model = {"path": "/nowhere", "load_format": "auto", "chat_template": "", "names": [self.name]}
            every = [[_text(name), _text(parent)] for name, parent in self.names.items()]
            return JSONResponse({**shown, "sequence": self.sequence, "snapshot": every, "model": model})
        changes = [change for change in self.changes if change["sequence"] > int(query["after"])]
        return JSONResponse({**shown, "sequence": self.sequence, "changes": changes})

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"data": [{"id": name} for name in (self.name, *self.others)]})

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        match self.behaviour:
            case "503":
                return JSONResponse({"error": {"code": "engine_unavailable", "message": "away"}}, 503)
            case "429":
                return JSONResponse({"error": {"code": "queue_full", "message": "full"}}, 429)
            case "400":
                return JSONResponse({"error": {"code": 400, "message": "wrong"}}, 400)
            case "hang":
                self.behaviour = "silent"  # its events stop too
                await asyncio.sleep(60)
        if not body.get("stream"):
            if self.behaviour == "cut_before":
                return StreamingResponse(_cut(), media_type="application/json", headers={"content-length": "99"})
            ids = [token(body.get("seed") or 0, position) for position in range(body["max_tokens"])]
            return JSONResponse({"choices": [{"index": 0, "text": str(ids), "finish_reason": "length"}]})
        return StreamingResponse(self._chunks(body), media_type="text/event-stream")

    async def _chunks(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        if self.behaviour == "cut_before":
            yield b": waiting\n\n"
            raise CutError
        done = len(body.get("resume_token_ids") or [])
        cut_at = self.cut_again if done else self.cut_at
        for position in range(done, body["max_tokens"]):
            if position - done == cut_at and self.behaviour == "error_event":
                yield b'data: {"error":{"code":"engine_unavailable","message":"it stopped"}}\n\ndata: [DONE]\n\n'
                return
            if position - done == cut_at and self.behaviour == "freeze":
                yield b": still here\n\n"
                await asyncio.Event().wait()
            number = token(body["seed"], position)
            last = position == body["max_tokens"] - 1
            choice = {
                "index": 0,
                "text": f" {number}",
                "token_ids": [number],
                "finish_reason": "length" if last else None,
            }
            head = {"id": f"cmpl-{id(self)}-{done}", "object": "text_completion", "created": 1, "model": "fake"}
            event = f"data: {json.dumps({**head, 'choices': [choice]})}\n\n".encode()
            if position - done == cut_at and self.behaviour == "cut_after":
                yield event[: len(event) // 2]
                raise CutError
            if self.behaviour == "cut_at_end" and last:
                yield event
                raise CutError
            yield event
            await asyncio.sleep(0)
        yield b"data: [DONE]\n\n"

    async def __aenter__(self) -> FakeReplica:
        routes = [
            Route("/v1/replica/events", self.events),
            Route("/v1/models", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), port=0, log_config=None, lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        self._serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.should_exit = self._server.force_exit = True
        await self._serving


class Router:
    """The router's application in this event loop, and a client of it."""

    def __init__(self, config: RouteConfig) -> None:
        self.config = config

    async def __aenter__(self) -> Router:
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=2.0))
        self.metrics, self.fleet = RouterMetrics(), Fleet(self.config, self._http)
        relay = Relay(self.fleet, self._http, self.metrics, self.config)
        self.app = RouterApp(self.config, self.fleet, Texts(""), relay, self.metrics)
        self.fleet.start()
        transport = httpx.ASGITransport(self.app, client=("127.0.0.1", 1))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.fleet.close()
        await self.client.aclose()
        await self._http.aclose()

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)

    async def all_up(self) -> None:
        await self.until(lambda: all(each.up and each.root for each in self.fleet.replicas))

    def idle(self) -> bool:
        return all(each.outstanding == each.waiting == each.waiting_tokens == 0 for each in self.fleet.replicas)


@contextlib.asynccontextmanager
async def routed(*replicas: FakeReplica, **options: Any) -> AsyncIterator[Router]:
    """A router in front of these, all up."""
    async with contextlib.AsyncExitStack() as stack:
        for each in replicas:
            await stack.enter_async_context(each)
        config = RouteConfig(replica=tuple(each.url for each in replicas), **options)
        router = await stack.enter_async_context(Router(config))
        await router.all_up()
        yield router


def said(text: str) -> tuple[str, bool]:
    """(the text of a stream, whether it has its end)."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    assert len({chunk["id"] for chunk in chunks if "id" in chunk}) <= 1
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk.get("choices")), lines[-1:] == ["[DONE]"]


async def _cut() -> AsyncIterator[bytes]:
    yield b'{"choices":'
    raise CutError


def _text(name: bytes) -> str:
    return base64.b64encode(name).decode()
