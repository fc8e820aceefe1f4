"""Many decode steps at once, exactly as single steps would have gone.

While no request arrives, ends or needs a page that is not free, a step only adds one token to every running request:
the scheduler's decision is known in advance. What does change along the way, pages taken and pages that enter the
prefix tree, goes through the KV manager's own verbs, in the order in which single steps would call them. A test
compares both ways token by token. Called by the replica; writes request state as the scheduler does.
"""

from __future__ import annotations

from tokenmill.engine.kv.manager import KVManager
from tokenmill.plan.simulate.runner import CostModel, output_id
from tokenmill.types import Request, ScheduledTokens


def longest_stride(requests: list[Request]) -> int:
    """Steps that all of them can take before the one in which the first ends."""
    return min([request.params.max_tokens - request.num_output_tokens for request in requests]) - 1


def stride(
    rows: list[ScheduledTokens], kv: KVManager, cost: CostModel, limit: int, now: float, bound: float
) -> list[float]:
    """Take up to `limit` decode steps from `now` on, none starting at or after `bound`; the milliseconds of each.

    `rows` are those of all running requests in the last step, in the scheduler's order; each request has one token left
    to compute.
    """
    requests = [row.request for row in rows]
    size = kv.layout.page_size
    takers, committers, begins = _appointments(rows, kv)
    pages_each = len(kv.layout.groups)
    count = len(requests)
    context = sum(begins) + count
    times: list[float] = []
    step = 0
    while step < limit and now < bound:
        slot = (step + 1) % size
        if takers[slot]:
            if kv.num_available < len(takers[slot]) * pages_each:
                break  # the scheduler decides which request is preempted
            for number in takers[slot]:
                requests[number].num_computed = begins[number] + step
                reserved = kv.reserve(requests[number], 1)
                assert reserved, "a free page could not be reserved"
        step += 1
        ms = cost.step_ms((), (count, float(context)))
        times.append(ms)
        now += ms
        context += count
        for number in committers[slot]:
            _move(requests[number], begins[number] + step, begins[number] + step)
            kv.commit(requests[number])
    for request, begin in zip(requests, begins, strict=True):
        _move(request, begin + step, begin + step + 1)
    return times


def _appointments(rows: list[ScheduledTokens], kv: KVManager) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """By step number modulo the page size: requests that need a page before it, and requests whose page is full after
    it; also the number of computed tokens of each at the start."""
    size = kv.layout.page_size
    takers: list[list[int]] = [[] for _ in range(size)]
    committers: list[list[int]] = [[] for _ in range(size)]
    begins = []
    for number, row in enumerate(rows):
        computed = row.request.num_computed
        begins.append(computed)
        slots = len(row.block_tables[0]) * size - computed  # tokens that have a place already
        takers[(slots + 1) % size].append(number)
        committers[-computed % size].append(number)
    return takers, committers, begins


def _move(request: Request, num_computed: int, num_tokens: int) -> None:
    request.num_computed = num_computed
    missing = num_tokens - len(request.token_ids)
    if missing > 0:
        request.token_ids += [output_id(request)] * missing
