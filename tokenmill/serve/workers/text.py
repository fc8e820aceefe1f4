"""What the service asks of the text workers: rendered prompts, token ids, verdicts on grammars.

Turns results into values or ApiErrors. Verdicts are remembered by content: a schema that is used again costs nothing.
Requests of one key with the same new grammar wait for one check. Knows neither queues nor processes (pool.py).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from tokenmill.errors import UserError
from tokenmill.grammar.source import check_limits
from tokenmill.serve.errors import ApiError
from tokenmill.serve.tenants.keys import Client
from tokenmill.serve.workers import jobs
from tokenmill.serve.workers.jobs import Accepted, CheckGrammar, Encode, Encoded, Failed, Rejected, Render, Rendered
from tokenmill.serve.workers.pool import WorkerPool
from tokenmill.types import StructuredSpec

_MAX_VERDICTS = 4096
_SMALL_CHOICE = 4096  # characters: a list of plain texts that cannot be hard to compile
_GRAMMAR = "response_format"


class TextWork:
    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()  # digest -> why it is refused; "": it is not
        self._checking: dict[tuple[str, bytes], asyncio.Event] = {}

    def use(self, pool: WorkerPool) -> None:
        """Other workers from now on, for the same model."""
        self._pool = pool

    async def render(self, job: Render, client: Client) -> str:
        result = await self._run(job, client, "messages")
        assert isinstance(result, Rendered)
        return result.text

    async def encode(self, job: Encode, client: Client) -> list[list[int]]:
        result = await self._run(job, client, "messages" if job.chat else "prompt")
        assert isinstance(result, Encoded)
        return result.token_ids

    async def check_grammar(self, spec: StructuredSpec, client: Client) -> None:
        """Raises ApiError 400 for a grammar that must not reach the engine."""
        if spec.kind == "json_object" or (spec.kind == "choice" and sum(map(len, spec.choices)) <= _SMALL_CHOICE):
            return
        try:
            check_limits(spec)
        except UserError as error:
            raise ApiError(400, str(error), param=_GRAMMAR) from None
        digest = _digest(spec)
        while digest not in self._verdicts:
            checking = self._checking.get((client.name, digest))
            if checking is not None:
                await checking.wait()
            else:
                await self._check(spec, digest, client)
        self._verdicts.move_to_end(digest)
        if self._verdicts[digest]:
            raise ApiError(400, self._verdicts[digest], param=_GRAMMAR)

    async def _check(self, spec: StructuredSpec, digest: bytes, client: Client) -> None:
        checking = self._checking[client.name, digest] = asyncio.Event()
        try:
            result = await self._pool.run(CheckGrammar(spec.kind, spec.text, spec.choices), client)
        finally:
            del self._checking[client.name, digest]
            checking.set()  # where this check was cancelled, another request makes its own
        if isinstance(result, Failed):
            raise ApiError(500, result.message)
        assert isinstance(result, (Accepted, Rejected))
        self._verdicts[digest] = result.message if isinstance(result, Rejected) else ""
        while len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    async def _run(self, job: jobs.Job, client: Client, param: str) -> jobs.Result:
        result = await self._pool.run(job, client)
        if isinstance(result, Rejected):
            raise ApiError(400, result.message, param=param)
        if isinstance(result, Failed):
            raise ApiError(500, result.message)
        return result


def _digest(spec: StructuredSpec) -> bytes:
    texts: Sequence[str] = (spec.kind, spec.text, *spec.choices)
    found = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        found.update(len(data).to_bytes(8, "little") + data)
    return found.digest()
