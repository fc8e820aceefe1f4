"""The question that a plan answers: model, devices, workload, prices, limits, and what the user fixed.

Records with range checks; nothing is computed here. Made by the command line, `deploy` and `optimize`, answered by
search/answer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import DeviceGroup
from tokenmill.plan.question.deployment import Deployment
from tokenmill.plan.question.planned_model import PlannedModel
from tokenmill.plan.question.pricing import Bill, Pricing
from tokenmill.plan.question.workload import Workload

SPECULATION_MODES = ("auto", "on", "off")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan must keep besides the workload's latencies. 0: no limit."""

    dollars_per_month: float = 0.0
    quality_loss: float = 0.0  # percent, at the high end of the range
    devices: int = 0


@dataclass(frozen=True, slots=True)
class Fixed:
    """What the user fixed; empty and 0 are searched."""

    weights: str = ""
    kv: str = ""
    engine: str = ""
    tp: int = 0
    ep: int = 0
    data_parallel: int = 0
    memory_share: float = 0.0  # of the device that the engine may use

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "data_parallel"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}", "give at least 1, or leave it out")
        if not 0 <= self.memory_share <= 1:
            raise UserError(f"a memory share of {self.memory_share:g}", "give 0.5 to 0.98")


@dataclass(frozen=True, slots=True)
class Speculation:
    """`draft_tokens` (K) proposed per step, each accepted with probability `acceptance`; one draft token costs
    `draft_cost` of a target step at batch 1."""

    draft_tokens: int = 4
    acceptance: float = 0.6
    draft_cost: float = 0.03  # a trained head or a draft model of a few percent of the size
    draft_share: float = 0.03  # of the model's memory, weights and KV alike

    def __post_init__(self) -> None:
        if self.draft_tokens < 1 or not 0 <= self.acceptance <= 1 or self.draft_cost < 0:
            raise UserError(
                f"speculation with {self.draft_tokens} drafts and an acceptance of {self.acceptance:g} is impossible",
                "give --draft-tokens of at least 1 and --acceptance from 0 to 1",
            )


@dataclass(frozen=True, slots=True)
class Tuning:
    """Batch limits that the user fixed (0: chosen) and whether to speculate. `drafts` describes the speculation."""

    max_sequences: int = 0
    batch_tokens: int = 0
    speculation: str = "off"
    drafts: Speculation = field(default_factory=Speculation)

    def __post_init__(self) -> None:
        if self.speculation not in SPECULATION_MODES:
            raise UserError(f"speculation is '{self.speculation}'", f"one of {', '.join(SPECULATION_MODES)}")
        if min(self.max_sequences, self.batch_tokens) < 0:
            raise UserError(
                f"batch limits of {self.max_sequences} sequences, {self.batch_tokens} tokens", "give 1 or more"
            )

    def applied(self, deployment: Deployment) -> Deployment:
        """The deployment with the limits that the user fixed."""
        return replace(
            deployment,
            max_sequences=self.max_sequences or deployment.max_sequences,
            batch_tokens=self.batch_tokens or deployment.batch_tokens,
        )

    def fixed_speculation(self, deployment: Deployment) -> Speculation | None:
        return self.drafts if self.speculation == "on" and deployment.can_speculate else None

    def with_drafter(self, deployment: Deployment) -> Deployment:
        """The deployment with the memory that the drafter takes."""
        return replace(deployment, draft_share=self.drafts.draft_share)


@dataclass(frozen=True, slots=True)
class Question:
    model: PlannedModel
    groups: Sequence[DeviceGroup]
    workload: Workload
    pricing: Pricing
    limits: Limits
    weights: str = ""
    kv: str = ""
    engine: str = ""
    tp: int = 0
    ep: int = 0
    data_parallel: int = 0
    memory_share: float = 0.0  # of a device that the engine may use; 0: the engine's default
    tuning: Tuning = field(default_factory=Tuning)  # batch limits and speculation
    fixed_fleet: bool = True  # only the given devices exist, and all are paid for
    target_cost: float = 0.0  # -0.6: at least 60 % below the baseline
    traits: tuple[str, ...] = ()  # of the use, for the decision guide (search/guide.py)
    bill: Bill | None = None  # what is paid today

    @property
    def fixed(self) -> Fixed:
        return Fixed(self.weights, self.kv, self.engine, self.tp, self.ep, self.data_parallel, self.memory_share)
