"""Tokens that are not a request's own yet, lent to it while positions after them are looked at.

Penalties, grammars, random numbers and batches read a request's tokens; lending shows them the history they would see
if the tokens were accepted. Everything is taken back at the end: the scheduler alone appends for good. Used by
verification and by drafters that compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tokenmill.types import Request


class Lender:
    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._lengths = [len(request.token_ids) for request in requests]

    def __call__(self, number: int, token_id: int) -> None:
        self._requests[number].token_ids.append(token_id)

    def take_back(self) -> None:
        for request, length in zip(self._requests, self._lengths, strict=True):
            del request.token_ids[length:]


@contextmanager
def lent(requests: Sequence[Request]) -> Iterator[Lender]:
    lender = Lender(requests)
    try:
        yield lender
    finally:
        lender.take_back()
