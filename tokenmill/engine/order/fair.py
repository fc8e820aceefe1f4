"""Weighted fair sharing between tenants, by start tags of virtual time; priority numbers come first, as in `priority`.

Each request starts, in virtual time, when its tenant's previous one ends there, or now if the tenant was away; a tenant
of twice the weight passes through virtual time half as fast. The cost of a request is estimated on arrival from
the tenant's earlier ones, and corrected by what was computed when it leaves. A tenant that already runs more than its
share gives way: another's request is admitted first, takes the place of one of its sequences, and gets its share of the
prompt tokens of a step; when pages run out, the tenant that runs most gives up a sequence. Where its tokens would make
the steps of another more than `max_slowdown` times as long as equal shares do, they take turns. With one tenant this
is first come, first served.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenmill.engine.order.base import Discipline
from tokenmill.engine.order.queue import RequestQueue
from tokenmill.engine.order.step_costs import StepCosts
from tokenmill.types import Request

_SCALE = 1024  # virtual time is whole: 1/1024 token
_FIRST_GUESS = 64.0  # tokens of output, before anything is known of a tenant
_LEARNING_RATE = 0.2
_MAX_TENANTS = 4096
_STEPS_PRESENT = 50  # after its last request a tenant is expected back: the next one finds the step short
_STEPS_TO_PROBE = 8  # every eighth limited step is a little longer
_STEP_SHARE = 0.75  # of the slowdown allowed; the rest is for what a step's time does not show


@dataclass(slots=True)
class _Tenant:
    ends: int = 0  # virtual time at which all it has asked for is accounted for
    output: float = _FIRST_GUESS  # tokens of output of its requests, running mean
    num_live: int = 0
    num_running: int = 0
    weight: float = 1.0

    def load(self, num_running: int) -> float:
        """What it uses of the slots, in shares, if it ran so many sequences."""
        return num_running / self.weight


@dataclass(slots=True)
class _Charge:
    start: int
    guess: float
    computed: int = 0


class WeightedFair(Discipline):
    def __init__(self, max_slowdown: float = 2.0) -> None:
        super().__init__(max_slowdown)
        self._costs = StepCosts()
        self._num_steps = 0
        self._seen: dict[str, int] = {}  # tenant -> the step in which it was last there
        self._now = 0  # virtual time: the latest start tag that got tokens
        self._tenants: dict[str, _Tenant] = {}
        self._present: dict[str, _Tenant] = {}  # those with requests
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
            tenant.weight = request.weight
            self._present[request.tenant] = tenant
        return (request.priority, self._charges[request].start, request.arrival)

    def outranks(self, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.priority

    def next(self, waiting: RequestQueue) -> Request:
        """The first in order, unless its tenant would have to give way to another at once."""
        first = super().next(waiting)
        if len(self._present) < 2:
            return first
        head = self._present[first.tenant]
        needy = [name for name, each in self._present.items() if each.num_live > each.num_running]
        name = min(needy, key=lambda name: self._present[name].load(self._present[name].num_running))
        tenant = self._present[name]
        if tenant is head or tenant.load(tenant.num_running + 1) > head.load(head.num_running):
            return first
        others = (other for other in waiting.snapshot() if other.tenant == name and other.priority == first.priority)
        return next(others, first)

    def preemptible(self, waiting: Request, running: RequestQueue) -> list[Request]:
        """Those of a worse priority number; of the same number those of tenants that still run more than the waiting
        one's with one more, the heaviest tenant's first. Nothing can then be preempted in return."""
        chosen = super().preemptible(waiting, running)
        if chosen or len(self._present) < 2:
            return chosen
        own = self._present[waiting.tenant]
        goal = own.load(own.num_running + 1)
        sequences = self._by_tenant(running, waiting.priority)
        sequences.pop(waiting.tenant, None)
        counts = {name: self._present[name].num_running for name in sequences}
        while sequences:
            name = max(sequences, key=lambda name: self._present[name].load(counts[name] - 1))
            if self._present[name].load(counts[name] - 1) < goal:
                break
            chosen.append(sequences[name].pop())
            counts[name] -= 1
            if not sequences[name]:
                del sequences[name]
        return chosen

    def victim(self, running: RequestQueue) -> Request:
        """Of those with the worst priority number, the last of the tenant that runs most; one sequence is not much."""
        last = running.last()
        if len(self._present) < 2:
            return last
        sequences = self._by_tenant(running, last.priority)
        loads = {name: self._present[name].load(self._present[name].num_running - 1) for name in sequences}
        most = max(loads.values())
        return last if loads[last.tenant] == most else sequences[max(loads, key=loads.__getitem__)][-1]

    def prompt_share(self, request: Request, others: Sequence[Request]) -> float:
        if len(self._present) < 2:
            return 1.0
        weights = {other.tenant: other.weight for other in others if other.priority <= request.priority}
        weights[request.tenant] = request.weight
        return request.weight / sum(weights.values())

    @property
    def shares_steps(self) -> bool:
        return self.max_slowdown > 0 and self._costs.known and len(self._present.keys() | self._seen.keys()) > 1

    def step_allowances(self, demands: Mapping[str, int]) -> dict[str, int]:
        """Equal tokens for all, by weight, as many as the least of them wants; then more for those that want more, in
        turn, while nobody's step becomes longer than the slowdown allows. Tenants that were here a moment ago count as
        if they wanted one token."""
        everyone = dict.fromkeys(self._seen, 1) | dict(demands)
        if len(everyone) < 2:
            return {}
        least = min(count / self._weight(name) for name, count in everyone.items())
        equal = {name: max(1, min(count, round(least * self._weight(name)))) for name, count in everyone.items()}
        alone = self._costs.predict(min(everyone.values()))
        limit = max(self._costs.predict(sum(equal.values())), self.max_slowdown * _STEP_SHARE * alone)
        if self._costs.predict(sum(demands.values())) <= limit:
            return {}
        more = int((limit - self._costs.predict(0)) / self._costs.token) - sum(equal[name] for name in demands)
        if self._num_steps % _STEPS_TO_PROBE == 0:  # steps that are all alike do not show what a token costs
            more += 1 + sum(equal.values()) // 4
        return _fill({name: equal[name] for name in demands}, demands, more)

    def record_step(self, counts: Mapping[str, int], seconds: float) -> None:
        self._costs.record(sum(counts.values()), seconds)
        self._num_steps += 1
        self._seen.update(dict.fromkeys(counts, self._num_steps))
        for name in [name for name, seen in self._seen.items() if self._num_steps - seen > _STEPS_PRESENT]:
            del self._seen[name]

    def _weight(self, name: str) -> float:
        return self._tenants[name].weight if name in self._tenants else 1.0

    def started(self, request: Request) -> None:
        self._tenants[request.tenant].num_running += 1

    def stopped(self, request: Request) -> None:
        self._tenants[request.tenant].num_running -= 1

    def charge(self, request: Request, num_tokens: int) -> None:
        charged = self._charges[request]
        charged.computed += num_tokens
        self._now = max(self._now, charged.start)

    def leave(self, request: Request) -> None:
        """Correct the tenant's account by the difference between the estimate and what was computed."""
        charged = self._charges.pop(request)
        tenant = self._tenants[request.tenant]
        tenant.num_live -= 1
        if not tenant.num_live:
            del self._present[request.tenant]
        tenant.ends += _virtual(charged.computed - charged.guess, request)
        if charged.computed:
            tenant.output += _LEARNING_RATE * (request.num_output_tokens - tenant.output)

    @staticmethod
    def _by_tenant(running: RequestQueue, priority: int) -> dict[str, list[Request]]:
        """The running requests of one priority number by tenant, in order."""
        found: defaultdict[str, list[Request]] = defaultdict(list)
        for request in running.snapshot():
            if request.priority == priority:
                found[request.tenant].append(request)
        return found

    def _forget_absent(self) -> None:
        """Tenants without requests whose time has come are as good as new ones; keep the table small."""
        if len(self._tenants) < _MAX_TENANTS:
            return
        kept = {name: each for name, each in self._tenants.items() if each.num_live or each.ends > self._now}
        self._tenants = kept


def _fill(allowed: dict[str, int], demands: Mapping[str, int], more: int) -> dict[str, int]:
    """Give `more` tokens to those that want more, the same number to each as far as they want them."""
    wanting = sorted((demands[name] - count, name) for name, count in allowed.items() if demands[name] > count)
    while wanting and more >= len(wanting):
        each = min(wanting[0][0], more // len(wanting))
        for _, name in wanting:
            allowed[name] += each
        more -= each * len(wanting)
        wanting = [(wanted - each, name) for wanted, name in wanting if wanted > each]
    return allowed


def _virtual(num_tokens: float, request: Request) -> int:
    return round(num_tokens * _SCALE / request.weight)
