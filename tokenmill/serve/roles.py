"""Split prefill and decode, the server's part: which pages a request may move, and prompts that are computed elsewhere.

A request of role `decode` that lacks more than --split-min-tokens of its prompt has that computed by a server of role
`prefill`: the engine says so when the request comes near its turn, this server sends the prompt there, and the engine
fetches the pages as they are made. Whatever goes wrong, the engine computes what it lacks. `kv_source` and `kv_publish`
of a body do the same for callers that place requests themselves; only keys with that right may send them, and only
peers that the operator named are ever connected to.
"""

from __future__ import annotations

import asyncio
import random
import re
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tokenmill.config import EngineConfig
from tokenmill.engine.messages import SourceFailed
from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.serve.callers import PageMoves
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.errors import ApiError
from tokenmill.serve.generation import Generation, Member
from tokenmill.serve.supervision.engine import Engine
from tokenmill.serve.tenants.keys import Client
from tokenmill.types import KvLease, Request

if TYPE_CHECKING:
    import httpx

_log = get_logger(__name__)
DEFAULT_LISTEN = "127.0.0.1:7800"
_CONNECT_SECONDS = 2.0
_TTL = 30.0
_MAX_TTL = 600.0
_LEASE = re.compile(r"[A-Za-z0-9_.-]{8,64}")
_SALT = re.compile(r"(?:[0-9a-f]{2}){0,31}")


def with_role(config: ServeConfig, options: EngineConfig, num_models: int) -> EngineConfig:
    """The options of an engine in this role; what contradicts it is refused."""
    role, urls = config.role, config.prefill_url
    if role != "both" and num_models > 1:
        raise UserError(f"--role {role} is for one model, {num_models} are given", "start a server for each")
    if role == "decode" and not options.kv_peer:
        raise UserError("--role decode does not say where pages come from", "give --kv-peer HOST:PORT")
    if role == "decode" and options.kv_listen:
        raise UserError("--role decode has a --kv-listen", "leave it out, or take --role both")
    if role == "prefill" and (options.kv_peer or urls):
        raise UserError("--role prefill has a --kv-peer or a --prefill-url", "leave it out, or take --role both")
    if urls and len(urls) != len(options.kv_peer):
        raise UserError(
            f"there are {len(urls)} --prefill-url and {len(options.kv_peer)} --kv-peer",
            "give one --kv-peer for each, in the same order",
        )
    if any(not url.startswith(("http://", "https://")) for url in urls):
        raise UserError(f"prefill_url is {', '.join(urls)}", "give URLs like http://10.0.0.5:8000")
    return replace(options, kv_listen=DEFAULT_LISTEN) if role == "prefill" and not options.kv_listen else options


class Roles:
    """What this server moves pages for. The service owns it."""

    def __init__(self, config: ServeConfig, options: Mapping[str, Any], engine: Engine) -> None:
        """`options`: of the engine, resolved."""
        self._config = config
        self._engine = engine
        self._listens_at = str(options.get("kv_listen") or "")
        self._peers = tuple(options.get("kv_peer") or ())
        self._timeout = float(options.get("kv_source_timeout") or 60.0)
        self._urls = dict(zip(self._peers, config.prefill_url, strict=False)) if config.prefill_url else {}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by request id: prompts that are computed elsewhere
        self._loads = dict.fromkeys(self._urls, 0)  # prompt tokens under way, by peer
        self._client: httpx.AsyncClient | None = None
        engine.on_source_wanted = self._on_wanted

    # --- requests ---

    def read(self, client: Client, source: Any, publish: Any) -> PageMoves:
        """What a body asks for: its fields kv_source and kv_publish. Raises ApiError."""
        if source is None and publish is None:
            return PageMoves()
        param = "kv_publish" if publish is not None else "kv_source"
        if not client.moves_pages:
            raise ApiError(403, f"this key may not use {param}", param=param, code="kv_transfer_forbidden")
        if source is not None and publish is not None:
            raise ApiError(400, "kv_source and kv_publish are both given: keep one of them", param=param)
        if _LEASE.fullmatch((source or publish).lease) is None:
            raise ApiError(400, f"the lease of {param} is not a name of 8 to 64 letters and digits", param=param)
        if source is not None:
            if source.address not in self._peers:
                problem = "the address of kv_source is not a --kv-peer of this server"
                raise ApiError(400, problem, param=param, code="kv_source_unknown")
            return PageMoves(source=KvLease(source.lease, source.address, _TTL))
        if not self._listens_at:
            raise ApiError(400, "this server has no pages to fetch: serve with --role prefill", param=param)
        if not 1.0 <= publish.ttl <= _MAX_TTL or _SALT.fullmatch(publish.salt or "") is None:
            raise ApiError(400, f"kv_publish has a ttl of 1 to {_MAX_TTL:g} seconds and a salt in hex", param=param)
        salt = None if publish.salt is None else bytes.fromhex(publish.salt)
        return PageMoves(publishes=KvLease(publish.lease, ttl=publish.ttl), salt=salt)

    def put_into(self, request: Request, moves: PageMoves, num_prompts: int) -> None:
        """Say where the pages of a request go or come from. Raises ApiError."""
        if moves and (num_prompts > 1 or (moves.publishes is not None and request.params.n > 1)):
            raise ApiError(400, "pages are moved for one prompt with one answer", param="prompt")
        if request.embeds:
            return
        if moves.publishes is None and self._config.role == "prefill":
            problem = "this server computes prompts for others: send kv_publish, or ask a server of role decode"
            raise ApiError(400, problem, code="prefill_only")
        request.publishes, request.source = moves.publishes, moves.source
        if moves.salt is not None:
            request.cache_salt = moves.salt
        if self._urls and not moves and len(request.prompt_ids) > self._config.split_min_tokens:
            least = min(self._loads.values())
            address = random.choice([peer for peer, load in self._loads.items() if load == least])
            request.source = KvLease(uuid.uuid4().hex, address, _TTL, self._config.split_min_tokens, on_demand=True)

    def shown(self, generation: Generation) -> dict[str, Any]:
        """For the answer to a request with kv_publish: what a request elsewhere can send as kv_source."""
        lease = generation.members[0].request.publishes
        return {} if lease is None else {"kv_source": {"address": self._listens_at, "lease": lease.name}}

    def forget(self, generation: Generation) -> None:
        """It has ended: nobody waits for its prompt any more."""
        for member in generation.members if self._tasks else ():
            task = self._tasks.pop(member.request.request_id, None)
            if task is not None:
                task.cancel()

    # --- prompts that are computed elsewhere ---

    def _on_wanted(self, member: Member) -> None:
        request_id = member.request.request_id
        task = self._tasks[request_id] = asyncio.create_task(
            self._prefill(member.request), name=f"prefill-{request_id}"
        )
        task.add_done_callback(lambda _task: self._tasks.pop(request_id, None))

    async def _prefill(self, request: Request) -> None:
        """Have a prompt computed. The engine waits for its pages, not for this; it must hear of a failure at once."""
        lease = request.source
        assert lease is not None
        self._loads[lease.address] += len(request.prompt_ids)
        try:
            problem = await self._post(request, lease)
        finally:
            self._loads[lease.address] -= len(request.prompt_ids)
        if problem:
            _log.warning("%s does not compute a prompt: %s", self._urls[lease.address], problem)
            self._engine.tell(SourceFailed(request.request_id))

    async def _post(self, request: Request, lease: KvLease) -> str:
        """Why it failed; empty if it did not."""
        import httpx

        if self._client is None:
            key = self._config.prefill_api_key
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
            timeout = httpx.Timeout(self._timeout, connect=_CONNECT_SECONDS)
            self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout, trust_env=False)
        body: dict[str, Any] = {"prompt": request.prompt_ids, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        body["kv_publish"] = {"lease": lease.name, "ttl": lease.ttl, "salt": request.cache_salt.hex()}
        if request.adapter is not None:
            body["model"] = request.adapter.name
        try:
            answer = await self._client.post(f"{self._urls[lease.address].rstrip('/')}/v1/completions", json=body)
        except httpx.HTTPError as error:
            return str(error) or type(error).__name__
        return "" if answer.status_code == 200 else f"status {answer.status_code}: {answer.text[:200]}"
