"""How large the simulated engine is: KV pages, limits of a step. The memory model's answer in the scheduler's terms.

One shape serves one engine loop. A deployment with pipeline stages runs one loop per stage in flight, each with its
share of the pages. Called by the job; knows nothing of time.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import KVGroup, KVLayout
from tokenmill.hardware.memory import layout_of
from tokenmill.plan.question.deployment import PAGE_SIZE, Deployment, plan_memory

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineShape:
    layout: KVLayout
    num_pages: int
    batch_tokens: int
    max_running: int
    context: int  # longest prompt + output that is accepted
    scheduling: str = "fcfs"
    kv_policy: str = "lru"
    itl: float = 0.0  # ms between two tokens that the scheduler tries to keep; 0: no objective


def shape_of(deployment: Deployment, context: int = 0, page_size: int = PAGE_SIZE) -> EngineShape:
    """The engine of one deployment; `context` 0: as long as the model and the memory allow."""
    d = deployment
    needs = d.model.kv_needs(d.tp, d.kv_bytes)
    memory = plan_memory(d)
    budget = memory.kv * d.pp  # every stage keeps its own layers
    state = sum(need.layers * need.state_bytes for need in needs)
    running = d.max_sequences
    if state:  # recurrent state is per sequence: at most half of the memory goes there
        running = max(1, min(running, int(budget / 2 / state)))
        budget -= running * state
    layout, groups = layout_of(needs, page_size)
    if groups:  # one pool serves all groups, so a page is as large as the largest of them
        num_pages = int(max(0.0, budget) // max(page_bytes for _, page_bytes in groups))
    else:  # recurrent layers only: a page that no byte belongs to
        layout = KVLayout(page_size, 1, 1, 1, (KVGroup("sliding", page_size, (0,)),))
        num_pages = 4 * running if budget > 0 else 0
    num_pages = num_pages * d.data_parallel // d.pp
    longest = bisect_right(range(1, d.model.context_length + 1), num_pages, key=layout.peak_pages)
    if budget <= 0 or longest < page_size:
        raise UserError(
            f"{d.model.name} as {d.weights.name} leaves {memory.kv / _GIB:.1f} GiB for KV on {d.device.name} "
            f"x{d.devices} ({memory.weights / _GIB:.1f} GiB of weights per device)",
            "use fewer bits per weight, more devices (--tp), or a device with more memory",
        )
    if context > longest:
        raise UserError(f"a context of {context} tokens is more than the {longest} that fit", "lower --context")
    copies = d.data_parallel
    sequences = max(1, running * copies // d.pp)
    return EngineShape(layout, num_pages, d.batch_tokens * copies, sequences, context or longest)
