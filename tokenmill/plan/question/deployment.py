"""One deployment: a model on devices with its parallelism, formats and batch limits; and its memory.

Owns the record that every part of the planner reads, and applies hardware/memory.py to it. Knows nothing of time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from tokenmill.checkpoint.matrices import Matrix
from tokenmill.errors import UserError
from tokenmill.hardware.catalog import Device
from tokenmill.hardware.memory import (
    MemoryPlan,
    RuntimeCosts,
    activation_bytes,
    expert_workspace_bytes,
    sequences_that_fit,
    token_capacity,
)
from tokenmill.hardware.weight_formats import WeightFormat, find_format, weight_bytes
from tokenmill.plan.question.engines import check_engine
from tokenmill.plan.question.planned_model import PlannedModel

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Deployment:
    """`tp` shards attention, `data_parallel` replicates it; the experts of one layer lie on all tp x data_parallel
    devices: `ep` ways by whole experts, the remaining factor inside each expert."""

    model: PlannedModel
    device: Device
    weights: WeightFormat = field(default_factory=lambda: find_format("bf16"))
    kv_bytes: float = 2.0
    engine: str = "vllm"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    data_parallel: int = 1
    batch_tokens: int = 8192
    max_sequences: int = 256
    utilization: float = 0.92
    draft_share: float = 0.0  # weights and KV of a drafter, as a share of the model's
    runtime: RuntimeCosts = field(default_factory=RuntimeCosts)

    def __post_init__(self) -> None:
        check_engine(self.engine)
        for name in ("tp", "pp", "ep", "data_parallel", "batch_tokens", "max_sequences"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.ep > self.group:
            raise UserError(f"ep {self.ep} exceeds the {self.group} devices of the group", "lower --ep")

    @property
    def group(self) -> int:
        """Devices that work on one layer."""
        return self.tp * self.data_parallel

    @property
    def devices(self) -> int:
        return self.group * self.pp

    @property
    def parallelism(self) -> str:
        sizes = (("tp", self.tp), ("pp", self.pp), ("dp", self.data_parallel), ("ep", self.ep))
        return " ".join(f"{name}{size}" for name, size in sizes if size > 1 or name == "tp")

    @property
    def can_speculate(self) -> bool:
        """A pipeline would have to send drafts back through all stages; engines do not offer that."""
        return self.pp == 1

    @property
    def expert_tp(self) -> int:
        return max(1, self.group // self.ep)


def rank_parameters(matrix: Matrix, tp: int, group: int) -> float:
    """Parameters of one matrix on one device of its group."""
    if matrix.part == "expert":
        return matrix.parameters / group
    if matrix.split == "none":
        return float(matrix.parameters)
    return matrix.parameters / tp


def weight_bytes_per_device(deployment: Deployment) -> float:
    """F1 for one device; layers are spread over pipeline stages, embedding and head are on the first and last."""
    d = deployment
    return _weight_bytes_per_device(d.model, d.weights, d.tp, d.group, d.pp)


@lru_cache(1 << 12)  # a search asks for every KV width and batch limit
def _weight_bytes_per_device(model: PlannedModel, weights: WeightFormat, tp: int, group: int, pp: int) -> float:
    tensors = []
    for count, matrix in model.matrices():
        share = count / pp if matrix.part not in ("embedding", "head", "vision") else float(count)
        tensors.append((share * rank_parameters(matrix, tp, group), matrix.part, matrix.split))
    return weight_bytes(tensors, weights)


def total_weight_bytes(model: PlannedModel, weights: WeightFormat) -> float:
    """F1 for the whole model, as a file would hold it."""
    tensors = [(float(count * matrix.parameters), matrix.part, matrix.split) for count, matrix in model.matrices()]
    return weight_bytes(tensors, weights)


def bits_per_weight(model: PlannedModel, weights: WeightFormat) -> float:
    return 8 * total_weight_bytes(model, weights) / model.parameters


def plan_memory(deployment: Deployment) -> MemoryPlan:
    """Where the bytes of one device go; `.kv` is what the KV cache gets."""
    d, model = deployment, deployment.model
    widest, workspace = 0, 0.0
    for kind in model.layers:
        ffn = kind.feed_forward
        widest = max(widest, ffn.width)
        if ffn.num_experts:
            tokens = d.batch_tokens
            need = expert_workspace_bytes(tokens, ffn.experts_per_token, model.hidden_size, ffn.num_experts, d.ep)
            workspace = max(workspace, need)
    activations = activation_bytes(
        d.batch_tokens, model.hidden_size, widest, model.vocab_size, d.tp, d.max_sequences, workspace
    )
    return MemoryPlan(
        usable=float(d.device.usable_bytes),
        utilization=d.utilization,
        weights=weight_bytes_per_device(d) * (1.0 + d.draft_share),
        activations=activations,
        runtime=d.runtime.total(d.group),
    )


@dataclass(frozen=True, slots=True)
class Room:
    """What memory leaves for requests of one length."""

    memory: MemoryPlan
    kv_tokens: int  # of one attention replica, as engines log it
    sequences: int  # at once, over all attention replicas


def room_for(deployment: Deployment, num_tokens: int) -> Room:
    memory = plan_memory(deployment)
    needs = deployment.model.kv_needs(deployment.tp, deployment.kv_bytes * (1.0 + deployment.draft_share))
    budget = max(0.0, memory.kv) * deployment.pp
    fit = sequences_that_fit(needs, budget, num_tokens, PAGE_SIZE) * deployment.data_parallel
    return Room(memory, token_capacity(needs, budget, PAGE_SIZE), fit)
