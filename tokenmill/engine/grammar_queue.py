"""Requests that wait for their grammar to be compiled, so that no step waits for a compiler.

A request whose grammar is ready goes on to the scheduler; one whose grammar is bad or too slow is refused, alone. The
engine loop calls it between steps.
"""

from __future__ import annotations

from collections.abc import Iterator

from tokenmill.errors import UserError
from tokenmill.grammar.compiler import GrammarCompiler, GrammarJob
from tokenmill.log import get_logger
from tokenmill.types import Request

_log = get_logger(__name__)


class GrammarQueue:
    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._jobs: dict[str, tuple[Request, GrammarJob]] = {}  # by request id

    def add(self, request: Request) -> None:
        assert self._compiler is not None
        assert request.params.structured is not None
        job = self._compiler.submit(request.params.structured, request.tenant)
        self._jobs[request.request_id] = (request, job)

    def cancel(self, request_id: str) -> bool:
        """False if the request does not wait here."""
        waiting = self._jobs.pop(request_id, None)
        if waiting is None:
            return False
        if self._compiler is not None:
            self._compiler.withdraw(waiting[1])
        return True

    def take(self) -> Iterator[Request | tuple[str, UserError]]:
        """Those whose wait is over: a request with its grammar, or the id of one that is refused and why."""
        if self._jobs and self._compiler is not None:
            self._compiler.replace_stuck_worker()
        for request_id, (request, job) in list(self._jobs.items()):
            if job.done:
                del self._jobs[request_id]
                error = _finish(request, job)
                yield request if error is None else (request_id, error)

    def wait(self, seconds: float) -> None:
        """Until the grammar of the request that came first is ready, at most `seconds`."""
        for _, job in self._jobs.values():
            job.wait(seconds)
            return

    def count_of(self, digest: bytes) -> int:
        """Requests of a version of an adapter."""
        adapters = (request.adapter for request, _ in self._jobs.values())
        return sum(adapter is not None and adapter.digest == digest for adapter in adapters)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._jobs

    def __len__(self) -> int:
        return len(self._jobs)


def _finish(request: Request, job: GrammarJob) -> UserError | None:
    try:
        request.grammar = job.result()
    except UserError as error:
        return error
    except Exception as error:  # the library's own: it must not end the engine
        _log.exception("a grammar could not be compiled")
        return UserError(f"the {job.spec.kind} could not be compiled: {error}", "make it simpler")
    return None
