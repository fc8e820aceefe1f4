"""/v1/files and /v1/batches through the whole application, with an engine that answers at once: who sees what, limits,
and that rows of a batch take the way of every request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.serve.live_server import until
from tests.unit.serve.test_service_life import _OPTIONS, Engine
from tokenmill.checkpoint.number_tokenizer import numbering_tokenizer
from tokenmill.engine.messages import Ready
from tokenmill.serve.app import build_app
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.files.store import FileStore
from tokenmill.serve.generation import Generation
from tokenmill.serve.service import Service
from tokenmill.serve.tenants.keys import LANES, MAX_PRIORITY, Client, KeyRing, digest_of
from tokenmill.serve.tenants.prices import Prices
from tokenmill.serve.workers.jobs import Setup
from tokenmill.serve.workers.pool import WorkerPool

_URL = "/v1/completions"


class AnsweringEngine(Engine):
    state = "ready"

    def __init__(self) -> None:
        super().__init__()
        self.ranks: list[int] = []
        self.tenants: set[str] = set()

    def submit(self, generation: Generation) -> None:
        self.ranks += [member.request.priority for member in generation.members]
        self.tenants |= {member.request.tenant for member in generation.members}
        asyncio.get_running_loop().call_soon(self.answer, generation, "length")


def _keys() -> KeyRing:
    entries = []
    for name in ("alice", "bob"):
        client = Client(name, tokens_per_minute=20)
        client.owner = f"name {name}"
        entries.append((digest_of(f"{name}-key"), client))
    return KeyRing(entries)


class Site:
    def __init__(
        self,
        folder: Path | None,
        engine: AnsweringEngine | None = None,
        keys: KeyRing | None = None,
        prices: Prices | None = None,
        **options: Any,
    ) -> None:
        self.engine = engine or AnsweringEngine()
        self.keys = keys if keys is not None else _keys()
        config = ServeConfig(access_log=False, files_dir=str(folder or ""), refusal_limit=0, **options)
        identity = Ready(100, [0], _OPTIONS, "none", "none", "none", 0, 0.0)
        workers = WorkerPool(Setup("", 0), 0, 0)
        parts: tuple[Any, ...] = (self.engine, identity, numbering_tokenizer(100), None, workers)
        self.service = Service(config, ("m",), *parts, prices=prices)
        if folder is not None:
            self.service.files = FileStore(str(folder), config.max_files_size)
        self.app = build_app(self.service, self.keys)

    async def ask(self, key: str, method: str, path: str, **arguments: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, headers={"x-api-key": f"{key}-key"}, **arguments)

    async def upload(self, key: str, content: bytes, **fields: str) -> httpx.Response:
        data = {"purpose": "batch", **fields}
        return await self.ask(key, "POST", "/v1/files", data=data, files={"file": ("in.jsonl", content)})

    async def batch(self, key: str, *bodies: dict[str, Any], url: str = _URL) -> dict[str, Any]:
        """A batch of these, when it has ended."""
        lines = [json.dumps({"custom_id": str(number), "method": "POST", "url": url, "body": body})
                 for number, body in enumerate(bodies)]  # fmt: skip
        file = (await self.upload(key, "\n".join(lines).encode())).json()
        body = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
        made = (await self.ask(key, "POST", "/v1/batches", json=body)).json()
        runner = self.service.batches
        assert runner is not None
        owner = f"name {key}"
        await until(lambda: runner.find(owner, made["id"]).ended)
        found: dict[str, Any] = (await self.ask(key, "GET", f"/v1/batches/{made['id']}")).json()
        return found

    async def lines(self, key: str, file_id: str) -> dict[str, Any]:
        text = (await self.ask(key, "GET", f"/v1/files/{file_id}/content")).text
        return {line["custom_id"]: line["response"] for line in map(json.loads, text.splitlines())}


def run(site: Site, scenario: Callable[[Site], Awaitable[None]]) -> None:
    async def whole() -> None:
        try:
            await scenario(site)
        finally:
            if site.service.batches is not None:
                await site.service.batches.close()

    asyncio.run(whole())
    if site.service.files is not None:
        site.service.files.close()


def test_a_key_has_files_that_no_other_key_sees(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        made = await site.upload("alice", b"content\n" * 100_000)
        assert made.status_code == 200, made.text
        file = made.json()
        assert (file["object"], file["bytes"], file["filename"], file["purpose"]) == (
            "file",
            800_000,
            "in.jsonl",
            "batch",
        )
        assert (await site.ask("alice", "GET", f"/v1/files/{file['id']}")).json() == file
        assert (await site.ask("alice", "GET", f"/v1/files/{file['id']}/content")).content == b"content\n" * 100_000
        assert (await site.ask("alice", "GET", "/v1/files")).json()["data"] == [file]
        assert (await site.ask("bob", "GET", "/v1/files")).json()["data"] == []
        for method, tail in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            foreign = await site.ask("bob", method, f"/v1/files/{file['id']}{tail}")
            unknown = await site.ask("bob", method, f"/v1/files/file-0{tail}")
            assert foreign.status_code == unknown.status_code == 404
            assert foreign.json()["error"]["code"] == unknown.json()["error"]["code"]
        body = {"input_file_id": file["id"], "endpoint": _URL, "completion_window": "24h"}
        assert (await site.ask("bob", "POST", "/v1/batches", json=body)).status_code == 404
        assert (await site.ask("nobody", "GET", "/v1/files")).status_code == 401
        deleted = await site.ask("alice", "DELETE", f"/v1/files/{file['id']}")
        assert deleted.json() == {"id": file["id"], "object": "file", "deleted": True}
        assert (await site.ask("alice", "GET", f"/v1/files/{file['id']}")).status_code == 404

    run(Site(tmp_path), scenario)


def test_lists_come_in_pages(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        ids = [(await site.upload("alice", b"x")).json()["id"] for _ in range(3)]
        first = (await site.ask("alice", "GET", "/v1/files?limit=2")).json()
        assert ([each["id"] for each in first["data"]], first["has_more"]) == (ids[:0:-1], True)
        last = (await site.ask("alice", "GET", f"/v1/files?limit=2&after={first['last_id']}")).json()
        assert ([each["id"] for each in last["data"]], last["has_more"]) == (ids[:1], False)
        oldest = (await site.ask("alice", "GET", "/v1/files?order=asc&purpose=batch")).json()
        assert [each["id"] for each in oldest["data"]] == ids
        for query in ("limit=0", "limit=x", "after=file-0"):
            refused = await site.ask("alice", "GET", f"/v1/files?{query}")
            assert refused.status_code == 400
            assert refused.json()["error"]["type"] == "invalid_request_error"

    run(Site(tmp_path), scenario)


def test_an_upload_that_is_too_large_or_no_form_leaves_nothing(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        assert (await site.upload("alice", b"x" * 40_000)).status_code == 413  # half of the room is bob's
        assert (await site.upload("alice", b"x" * 200_000)).status_code == 413  # by its length
        assert (await site.upload("alice", b"x" * 32_000)).status_code == 200
        assert (await site.upload("bob", b"x", purpose="vision")).status_code == 400
        assert (await site.upload("bob", b"x", **{"expires_after[seconds]": "5"})).status_code == 400
        assert (await site.ask("bob", "POST", "/v1/files", json={})).status_code == 400
        assert (await site.ask("bob", "POST", "/v1/files", data={"purpose": "batch"})).status_code == 400
        form = {"content-type": "multipart/form-data; boundary=b", "x-api-key": "bob-key"}
        transport = httpx.ASGITransport(site.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            cut = b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\nxyz'
            assert (await client.post("/v1/files", content=cut, headers=form)).status_code == 400
        assert (await site.ask("bob", "POST", _URL, json={"prompt": "x" * 5000})).status_code == 413
        assert len([path for path in tmp_path.rglob("file-*") if path.suffix != ".json"]) == 1
        assert site.service.files is not None
        assert site.service.files.used("name bob") == 0

    run(Site(tmp_path, max_files_size=1 << 16, max_body_bytes=4096), scenario)


def test_rows_of_a_batch_are_requests_of_their_key(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        good = {"prompt": [1, 2, 3], "max_tokens": 4}
        batch = await site.batch("alice", good, good | {"model": "other"}, good | {"max_tokens": -1}, good)
        assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 4, "completed": 2, "failed": 2})
        output = await site.lines("alice", batch["output_file_id"])
        assert set(output) == {"0", "3"}
        assert output["0"]["body"]["usage"]["prompt_tokens"] == 3
        assert output["0"]["body"]["object"] == "text_completion"
        errors = await site.lines("alice", batch["error_file_id"])
        assert {name: each["status_code"] for name, each in errors.items()} == {"1": 404, "2": 400}
        assert site.engine.ranks == [LANES["batch"] + MAX_PRIORITY] * 2
        assert site.engine.tenants == {"alice"}
        alice = site.keys.find("alice-key")
        assert alice is not None
        assert alice.tokens is not None
        assert alice.tokens.level < 20 - 2 * 4 + 5  # 3 of the prompt and 1 of the output each; it refills
        assert alice.num_active == site.service.admission.num_active == 0
        assert (await site.ask("bob", "GET", f"/v1/batches/{batch['id']}")).status_code == 404
        assert (await site.ask("bob", "POST", f"/v1/batches/{batch['id']}/cancel")).status_code == 404
        assert (await site.ask("bob", "GET", "/v1/batches")).json()["data"] == []
        assert (await site.ask("alice", "GET", "/v1/batches")).json()["data"] == [batch]
        assert (await site.ask("alice", "POST", f"/v1/batches/{batch['id']}/cancel")).status_code == 409

    run(Site(tmp_path), scenario)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "90d"}, "completion_window"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
    ],
)
def test_a_batch_that_is_none_is_refused(tmp_path: Path, change: dict[str, Any], param: str) -> None:
    async def scenario(site: Site) -> None:
        body = {"input_file_id": "file-0", "endpoint": _URL, "completion_window": "24h", **change}
        refused = await site.ask("alice", "POST", "/v1/batches", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)

    run(Site(tmp_path), scenario)


def test_without_a_folder_the_routes_say_how_to_have_them() -> None:
    async def scenario(site: Site) -> None:
        for method, path in (("GET", "/v1/files"), ("POST", "/v1/batches"), ("GET", "/v1/files/file-1/content")):
            missing = await site.ask("alice", method, path)
            assert missing.status_code == 404
            assert "--files-dir" in missing.json()["error"]["message"]

    run(Site(None), scenario)
