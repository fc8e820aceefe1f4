"""Weighted fair sharing between tenants, by start tags of virtual time; priority numbers come first, as in `priority`.

Each request starts, in virtual time, when its tenant's previous one ends there, or now if the tenant was away; a tenant
of twice the weight passes through virtual time half as fast. The cost of a request is estimated on arrival from
the tenant's earlier ones, and corrected by what was computed when it leaves. With one tenant this is first come,
first served.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.engine.order.base import Discipline
from tokenmill.types import Request

_SCALE = 1024  # virtual time is whole: 1/1024 token
_FIRST_GUESS = 64.0  # tokens of output, before anything is known of a tenant
_LEARNING_RATE = 0.2
_MAX_TENANTS = 4096


@dataclass(slots=True)
class _Tenant:
    ends: int = 0  # virtual time at which all it has asked for is accounted for
    output: float = _FIRST_GUESS  # tokens of output of its requests, running mean
    num_live: int = 0


@dataclass(slots=True)
class _Charge:
    start: int
    guess: float
    computed: int = 0


class WeightedFair(Discipline):
    def __init__(self) -> None:
        self._now = 0  # virtual time: the latest start tag that got tokens
        self._tenants: dict[str, _Tenant] = {}
        self._charges: dict[Request, _Charge] = {}

    def key(self, request: Request) -> tuple[int, ...]:
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            self._forget_absent()
            tenant = self._tenants[request.tenant] = _Tenant()
        if request not in self._charges:
            prompt = len(request.prompt_ids) if request.index == 0 else 1  # siblings share the prompt's work
            guess = prompt + min(tenant.output, request.params.max_tokens)
            self._charges[request] = _Charge(max(self._now, tenant.ends), guess)
            tenant.ends = self._charges[request].start + _virtual(guess, request)
            tenant.num_live += 1
        return (request.priority, self._charges[request].start, request.arrival)

    def outranks(self, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.priority

    def charge(self, request: Request, num_tokens: int) -> None:
        charged = self._charges[request]
        charged.computed += num_tokens
        self._now = max(self._now, charged.start)

    def leave(self, request: Request) -> None:
        """Correct the tenant's account by the difference between the estimate and what was computed."""
        charged = self._charges.pop(request)
        tenant = self._tenants[request.tenant]
        tenant.num_live -= 1
        tenant.ends += _virtual(charged.computed - charged.guess, request)
        if charged.computed:
            tenant.output += _LEARNING_RATE * (request.num_output_tokens - tenant.output)

    def _forget_absent(self) -> None:
        """Tenants without requests whose time has come are as good as new ones; keep the table small."""
        if len(self._tenants) < _MAX_TENANTS:
            return
        kept = {name: each for name, each in self._tenants.items() if each.num_live or each.ends > self._now}
        self._tenants = kept


def _virtual(num_tokens: float, request: Request) -> int:
    return round(num_tokens * _SCALE / request.weight)
