"""The memory model: how many bytes a deployment needs, by one formula for planner and engine.

Weights by their stored bytes, KV by pages of the layout, activations of the largest step, and what the runtime itself
holds. Pure arithmetic (formulas F2, F3, F11, F12 of docs/planner.md); knows neither models nor devices by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import KVGroup, KVLayout

GIB = 1 << 30
# Without a stated budget the KV cache takes at most this share of the memory that is free.
DEFAULT_SHARE = 0.25
# Of recurrent states: snapshots for each sequence that runs, and the share of the remaining memory they may take.
SNAPSHOTS_PER_SEQUENCE = 4
_SNAPSHOT_SHARE = 0.25
_SPARE_SHARE = 0.5  # likewise of spare states, which come before snapshots
_MAX_EMPTY_PAGES = 1 << 18  # of models that keep nothing in pages
# Sampling workspace per (sequence, vocabulary entry): logits, probabilities, sorted copies and indices in float32.
SAMPLER_BYTES = 41.0


@dataclass(frozen=True, slots=True)
class KVBudget:
    num_pages: int
    page_bytes: int
    full_requests: float  # how many requests of the whole context fit at once
    reason: str
    state_bytes: int = 0  # recurrent states: of all sequences that run at once, and snapshots
    num_state_slots: int = 0
    num_spare_states: int = 0  # beyond the slots, for steps that are launched before it is known that they are planned
    fixed_bytes: int = 0  # of the store, beside its pages

    @property
    def nbytes(self) -> int:
        return self.num_pages * self.page_bytes + self.fixed_bytes + self.state_bytes


def kv_bytes_per_token(layout: KVLayout, page_bytes: int) -> float:
    """Bytes that one more token costs in a long sequence: only full groups grow."""
    growing = sum(group.kind != "sliding" for group in layout.groups)
    return growing * page_bytes / layout.page_size


def plan_kv(
    layout: KVLayout,
    page_bytes: int,
    context: int,
    concurrency: int,
    memory: int,
    available: int,
    share_of_available: float = DEFAULT_SHARE,
    prefix_caching: bool = False,
    queues_steps: bool = False,
    fixed_bytes: int = 0,
) -> KVBudget:
    """Pages for `concurrency` requests of `context` tokens, within `memory` (stated) or a share of `available`.

    What the store holds beside its pages (`fixed_bytes`) is taken off both. Recurrent states come next: every sequence
    that runs has its own, whatever its length. With a prefix cache, some of the rest is for snapshots of them; where
    steps are queued (`queues_steps`), some is for the states that these write.
    """
    one = layout.peak_pages(context)
    requested = one * concurrency
    if not page_bytes:  # the prefix cache may then name as many pages as it likes
        requested = max(requested, min(concurrency * ceil(context / layout.page_size), _MAX_EMPTY_PAGES))
    available -= fixed_bytes
    total = memory - fixed_bytes if memory else int(available * share_of_available)
    spares = _spare_states(layout, concurrency, total - one * page_bytes) if queues_steps else 0
    slots = _state_slots(layout, concurrency, total - layout.state_bytes * spares, prefix_caching)
    states = layout.state_bytes * (slots + spares)
    if not memory and states > available:
        raise UserError(
            f"the recurrent states of {concurrency} requests need {states / 2**20:.1f} MiB, "
            f"{available / 2**20:.1f} MiB are free",
            "lower --concurrency",
        )
    if memory:
        pages, reason = _pages_in(total - states, page_bytes, requested), "memory stated"
        if pages < one:
            needed = one * page_bytes + states + fixed_bytes
            raise UserError(
                f"a request of {context} tokens needs {needed / 2**20:.1f} MiB of KV cache, "
                f"memory allows {memory / 2**20:.1f} MiB",
                "lower --context" + " or --concurrency" * bool(states) + ", or raise --memory or "
                "--gpu-memory-utilization",
            )
        pages = min(pages, requested)
    else:
        share = _pages_in(total - states, page_bytes, requested)
        pages = max(one, min(requested, share))
        reason = "context x concurrency" if pages == requested else f"{share_of_available:.0%} of free memory"
    full_requests = pages / one if page_bytes else float(concurrency)
    return KVBudget(pages, page_bytes, full_requests, reason, states, slots, spares, fixed_bytes)


def _state_slots(layout: KVLayout, concurrency: int, memory: int, prefix_caching: bool) -> int:
    """One for each sequence that runs, and snapshots within a share of what these leave of `memory`."""
    if not layout.states:
        return 0
    left = max(0, memory - layout.state_bytes * concurrency)
    most = int(left * _SNAPSHOT_SHARE) // layout.state_bytes
    return concurrency + (min(most, SNAPSHOTS_PER_SEQUENCE * concurrency) if prefix_caching else 0)


def _spare_states(layout: KVLayout, concurrency: int, memory: int) -> int:
    """One for each sequence that runs, within a share of what the sequences leave of `memory`."""
    if not layout.states:
        return 0
    left = max(0, memory - layout.state_bytes * concurrency)
    return min(concurrency, int(left * _SPARE_SHARE) // layout.state_bytes)


def _pages_in(nbytes: int, page_bytes: int, requested: int) -> int:
    """Pages that fit; as many as wanted where a page has no bytes (a model without paged layers)."""
    if not page_bytes:
        return requested if nbytes >= 0 else 0
    return max(0, nbytes) // page_bytes


def free_within(utilization: float, total: int, free: int, held: int) -> int:
    """Bytes that this process may still take on a device of which it may hold a share, `held` of them already."""
    left = int(utilization * total) - held
    if left > free:
        raise UserError(
            f"{utilization:.0%} of the GPU's {total / GIB:.1f} GiB is more than the {(free + held) / GIB:.1f} GiB that "
            "other processes leave",
            f"use --gpu-memory-utilization {int((free + held) / total * 100) / 100:.2f} or less, or free the GPU",
        )
    return max(0, left)


@dataclass(frozen=True, slots=True)
class KVNeed:
    """What the layers of one kind keep on one rank. `kind`: "full" | "sliding" | "state" (per sequence, any length)."""

    kind: str
    layers: int
    bytes_per_token: float  # of one layer
    window: int = 0
    state_bytes: float = 0.0  # of one layer, per sequence


def layout_of(needs: Sequence[KVNeed], page_size: int) -> tuple[KVLayout, list[tuple[KVGroup, float]]]:
    """The engine's paging of these needs, and for each group the bytes of one of its pages.

    As in kv_layout.build_layout the smallest kind sets the group size, so other kinds may pad their last group.
    """
    paged = [need for need in needs if need.kind != "state"]
    size = min((need.layers for need in paged), default=1)
    groups = [
        (KVGroup(need.kind, need.window, tuple(range(size))), size * page_size * need.bytes_per_token)
        for need in paged
        for _ in range(ceil(need.layers / size))
    ]
    return KVLayout(page_size, size, 1, 1, tuple(group for group, _ in groups)), groups


def sequence_bytes(needs: Sequence[KVNeed], num_tokens: int, page_size: int = 16) -> float:
    """F3: bytes of one sequence on one rank, with windows, page rounding, group padding and recurrent state."""
    layout, groups = layout_of(needs, page_size)
    pages = sum(layout.group_pages(group, num_tokens) * page_bytes for group, page_bytes in groups)
    return pages + sum(need.layers * need.state_bytes for need in needs)


def token_capacity(needs: Sequence[KVNeed], budget: float, page_size: int = 16) -> int:
    """KV tokens that engines log: whole pages of all groups, as if every layer kept every token."""
    _, groups = layout_of(needs, page_size)
    page = sum(page_bytes for _, page_bytes in groups)
    return int(budget // page) * page_size if page else 0


def sequences_that_fit(needs: Sequence[KVNeed], budget: float, num_tokens: int, page_size: int = 16) -> int:
    one = sequence_bytes(needs, num_tokens, page_size)
    return int(budget // one) if one > 0 else 1 << 30


@dataclass(frozen=True, slots=True)
class RuntimeCosts:
    """F12: what the runtime itself holds on one device, in bytes, within the engine's own budget.

    vLLM measures its budget against the memory that was free when it started, so the CUDA context (0.45-0.6 GiB)
    lies outside; it must fit into the share that `utilization` leaves.
    """

    context: float = 0.06 * GIB
    communication: float = 0.25 * GIB  # NCCL buffers and peers' contexts; only with more than one device
    graphs: float = 0.36 * GIB  # logged: 0.11, 0.26, 0.36

    def total(self, devices: int) -> float:
        return self.context + self.graphs + (self.communication if devices > 1 else 0.0)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one device, by purpose. `kv` is what is left; negative means that the plan does not fit."""

    usable: float
    utilization: float
    weights: float
    activations: float
    runtime: float

    @property
    def kv(self) -> float:
        return self.usable * self.utilization - self.weights - self.activations - self.runtime

    @property
    def fits(self) -> bool:
        return self.kv > 0


def activation_bytes(
    batch_tokens: int,
    hidden: int,
    intermediate: int,
    vocab: int,
    tp: int = 1,
    max_sequences: int = 256,
    expert_workspace: float = 0.0,
) -> float:
    """F11: the larger of the widest layer's temporaries and the sampler's, plus the experts' workspace."""
    layer = batch_tokens * (3 * intermediate + 2 * hidden) / tp * 2
    sampler = max_sequences * vocab * SAMPLER_BYTES
    return max(layer, sampler) + expert_workspace


def expert_workspace_bytes(
    batch_tokens: int, per_token: int, hidden: int, num_experts: int, expert_parallel: int = 1
) -> float:
    """F11: rows gathered by expert, padded to blocks of 128, in float32; never more than every row once."""
    return batch_tokens * per_token * hidden * min(1.0, num_experts / expert_parallel / 128) * 4
