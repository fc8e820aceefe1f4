"""Requests that wait for their grammar in the engine process, so that no step waits for a compiler.

A request whose grammar is ready goes on to the scheduler; one whose grammar is bad or slow is refused, alone. Called by
the engine process between steps.
"""

from __future__ import annotations

from collections.abc import Iterator

from tokenmill.engine.messages import Refused, Submit
from tokenmill.errors import UserError
from tokenmill.grammar.compiler import GrammarCompiler, GrammarJob
from tokenmill.types import Request


class Compiling:
    def __init__(self, grammars: GrammarCompiler) -> None:
        self._grammars = grammars
        self._jobs: dict[str, tuple[Submit, GrammarJob]] = {}  # by request id

    def add(self, message: Submit) -> None:
        assert message.params.structured is not None
        self._jobs[message.request_id] = (message, self._grammars.submit(message.params.structured))

    def cancel(self, request_id: str) -> None:
        self._jobs.pop(request_id, None)

    def take(self) -> Iterator[Request | Refused]:
        """Those whose wait is over."""
        if self._jobs:
            self._grammars.relieve()
        for request_id, (message, job) in list(self._jobs.items()):
            if job.done:
                del self._jobs[request_id]
                yield _outcome(message, job)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._jobs

    def __len__(self) -> int:
        return len(self._jobs)


def _outcome(message: Submit, job: GrammarJob) -> Request | Refused:
    try:
        grammar = job.result()
    except UserError as error:
        return Refused(message.request_id, str(error))
    request = message.request()
    request.grammar = grammar
    return request
