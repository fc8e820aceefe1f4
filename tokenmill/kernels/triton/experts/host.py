"""Experts of a layer that lie in host memory, with slots on the GPU for some of them.

Before the products of a step, the experts that its tokens go to are copied into slots, on a stream of their own; those
with few tokens are computed on the host where that was measured to be cheaper. The kernels are those of layer.py and
find slots instead of experts, so that the results are the same numbers. The host has to see the ids, so a call cannot
be captured. Made by model/device_experts.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

import torch
from torch import Tensor

from tokenmill.kernels.ref_experts import RoutingSpec, activate
from tokenmill.kernels.triton.experts.choose import GEMV, Plan, rule
from tokenmill.kernels.triton.experts.layer import GpuExperts
from tokenmill.kernels.triton.experts.residency import Residency
from tokenmill.kernels.triton.experts.route import route
from tokenmill.kernels.triton.experts.rows import add_experts
from tokenmill.kernels.triton.experts.stack import GpuExpertStack, empty_slots, fill_slot

_MANY = 8  # tokens of the second measurement on the host


@dataclass(frozen=True, slots=True)
class HostExpert:
    """One expert in host memory; stacks of one."""

    gate_up: GpuExpertStack
    down: GpuExpertStack

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds, measured. The defaults always fetch."""

    fetch: float = 0.0  # copying one expert into a slot
    first: float = inf  # computing one token of one expert on the host
    further: float = 0.0  # each further token

    def cheaper_on_host(self, tokens: int) -> bool:
        return self.first + (tokens - 1) * self.further < self.fetch


class HostExperts:
    """Takes the place of GpuExperts for a layer. `stream`: on which experts are copied; None: the current one."""

    backend = "triton"

    def __init__(
        self,
        experts: Sequence[HostExpert],
        num_slots: int,
        spec: RoutingSpec,
        device: torch.device,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.experts, self.spec, self.costs = experts, spec, HostCosts()
        self.residency = Residency(len(experts), num_slots)
        first = experts[0]
        gate_up, down = (empty_slots(stack, num_slots, device) for stack in (first.gate_up, first.down))
        self._gpu = GpuExperts(gate_up, down, spec)
        self._device, self._stream = device, stream
        self._read: list[torch.cuda.Event | None] = [None] * num_slots  # by slot: when its last reader has ended
        self.detail = f"{first.gate_up.kind} x {num_slots} of {len(experts)}, the others in host memory"

    @property
    def nbytes(self) -> int:
        """On the GPU."""
        return self._gpu.nbytes

    @property
    def host_bytes(self) -> int:
        return sum(expert.nbytes for expert in self.experts)

    def measure(self) -> HostCosts:
        """Time one expert: copied into a slot, and computed on the host. Leaves the slots as they are marked: empty."""
        if self._device.type != "cuda" or not _computes(self.experts[0]):
            return HostCosts()

        def fetch() -> None:
            self._copy(0, 0)
            torch.cuda.synchronize(self._device)

        def compute(tokens: int) -> None:
            x = torch.ones(tokens, self._gpu.gate_up.depth)
            _compute(self.experts[-1], x, torch.ones(tokens, 1), self.spec)

        one, many = _seconds(partial(compute, 1)), _seconds(partial(compute, _MANY))
        return HostCosts(_seconds(fetch), one, max(0.0, (many - one) / (_MANY - 1)))

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """x [T, hidden], router logits [T, experts] -> [T, hidden]."""
        ids, weights = route(logits, self.spec)
        found, counts = ids.unique(return_counts=True)
        tokens = dict(zip(found.tolist(), counts.tolist(), strict=True))
        self.residency.count(tokens)
        slots = self.residency.slots
        on_host = [e for e, count in tokens.items() if e not in slots and self.costs.cheaper_on_host(count)]
        plan = self._plan(x.shape[0], self._gpu.gate_up.kind)
        if plan.kernel == GEMV:
            if not on_host:
                return self._one_by_one(x, ids, weights, plan, tokens.keys())
            plan = self._plan(x.shape[0], "mixed")  # a product: rows of experts come from two places
        rows = torch.empty(ids.numel(), x.shape[1], dtype=torch.bfloat16, device=x.device)
        for experts in self.residency.rounds(tokens.keys() - set(on_host)):
            self._fetch(experts)
            self._gpu.multiply_some(x, self._slots_of(experts)[ids.long()], weights, plan, rows)
            self._mark(experts)
        for expert in on_host:
            self._on_host(expert, x, ids, weights, rows)
        return add_experts(rows, ids.shape[1], x.dtype)

    def _plan(self, tokens: int, kind: str) -> Plan:
        """As if all experts were on the GPU."""
        return rule(kind, len(self.experts), self.spec.experts_per_token, tokens, self._gpu.down.depth)

    def _one_by_one(self, x: Tensor, ids: Tensor, weights: Tensor, plan: Plan, needed: Collection[int]) -> Tensor:
        """A few tokens, together if the slots hold all their experts, else each alone: its own always fit."""
        if len(needed) > self.residency.num_slots and x.shape[0] > 1:
            parts = zip(x.split(1), ids.split(1), weights.split(1), strict=True)
            return torch.cat([self._one_by_one(*part, plan, part[1].flatten().tolist()) for part in parts])
        self._fetch(needed)
        y = self._gpu.multiply(x, self._slots_of(needed)[ids.long()], weights, plan)
        self._mark(needed)
        return y

    def _slots_of(self, experts: Collection[int]) -> Tensor:
        """int32 [experts]: the slot of these, the number of slots for all others."""
        slots, own = self.residency.slots, set(experts)
        table = [slots[e] if e in own else self.residency.num_slots for e in range(len(self.experts))]
        return torch.tensor(table, dtype=torch.int32, device=self._device)

    def _fetch(self, experts: Collection[int]) -> None:
        copies = self.residency.place(experts)
        if self._stream is None:
            for expert, slot in copies:
                self._copy(expert, slot)
            return
        with torch.cuda.stream(self._stream):
            for expert, slot in copies:
                if (event := self._read[slot]) is not None:
                    self._stream.wait_event(event)
                self._copy(expert, slot)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _copy(self, expert: int, slot: int) -> None:
        fill_slot(self._gpu.gate_up, slot, self.experts[expert].gate_up)
        fill_slot(self._gpu.down, slot, self.experts[expert].down)

    def _mark(self, experts: Collection[int]) -> None:
        """The products queued so far read the slots of these experts."""
        if self._stream is None:
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        for expert in experts:
            self._read[self.residency.slots[expert]] = event

    def _on_host(self, expert: int, x: Tensor, ids: Tensor, weights: Tensor, rows: Tensor) -> None:
        """Compute the rows of one expert on the host and put them among the others."""
        self.residency.computed_on_host += 1
        tokens, place = (ids == expert).nonzero(as_tuple=True)
        inputs, own = x[tokens].to(torch.bfloat16).cpu(), weights[tokens, place].unsqueeze(1).cpu()
        rows[tokens * ids.shape[1] + place] = _compute(self.experts[expert], inputs, own, self.spec).to(rows.device)


def _computes(expert: HostExpert) -> bool:
    """Whether the host can compute this expert: as the kernels of the GPU have it, only 16-bit floats are readable."""
    return expert.gate_up.kind == expert.down.kind == "bf16"


def _compute(expert: HostExpert, x: Tensor, weights: Tensor, spec: RoutingSpec) -> Tensor:
    """x [n, hidden], weights [n, 1] -> bf16 [n, hidden], rounded where the kernels round."""
    x = x.float() * weights if spec.weights_on_input else x.float()
    gate, up = _linear(expert.gate_up, x).chunk(2, -1)
    y = _linear(expert.down, activate(gate, up, spec).to(torch.bfloat16).float())
    return (y if spec.weights_on_input else y * weights).to(torch.bfloat16)


def _linear(stack: GpuExpertStack, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, stack.tensors.codes.float(), stack.tensors.bias)


def _seconds(call: Callable[[], object], repeats: int = 3) -> float:
    """The shortest of a few runs, after one that does not count."""
    call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)
