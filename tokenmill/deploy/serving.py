"""What is to be served, in terms common to all engines and targets: the model, parallelism, limits and load.

Made from a plan (`tokenmill plan --json` or the planner itself). Knows no engine's flags and no manifest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import Catalog, Device
from tokenmill.plan.cost.this_machine import calibrated_device, is_this_machine

_LOAD_BYTES_PER_SECOND = 0.2e9  # a slow network volume: a start must not be taken for a hang
_WARM_UP_SECONDS = 300  # compilation and graph capture
SHUTDOWN_SECONDS = 90  # that requests in flight get after SIGTERM; the grace of every target is derived from it


@dataclass(frozen=True, slots=True)
class Serving:
    """One replica's settings and how many there are. `stored`: the weight format the checkpoint comes in."""

    model: str  # what the engine loads: hub id, folder or file
    name: str  # in the API and of the objects: lower case, digits, dashes
    device: Device
    tp: int = 1
    pp: int = 1
    ep: int = 1  # devices that whole experts are spread over
    data_parallel: int = 1  # copies of attention within a replica
    replicas: int = 1
    weights: str = "bf16"
    stored: str = "bf16"
    kv_bits: float = 16.0
    max_sequences: int = 64
    batch_tokens: int = 8192
    memory_share: float = 0.92
    context: int = 8192
    weight_bytes: int = 0
    users: int = 16  # that one replica is planned for
    draft_tokens: int = 0  # the plan assumes speculation with this many draft tokens

    @property
    def devices(self) -> int:
        """Of one replica."""
        return self.group * self.pp

    @property
    def group(self) -> int:
        """Devices that work on one layer."""
        return self.tp * self.data_parallel

    @property
    def sequences_per_copy(self) -> int:
        """What one copy of attention may run, for engines whose limit counts per copy."""
        return -(-self.max_sequences // self.data_parallel)

    @property
    def on_gpu(self) -> bool:
        return self.device.kind == "gpu"

    @property
    def start_seconds(self) -> int:
        """How long a cold start may take before it counts as failed."""
        return _WARM_UP_SECONDS + int(self.weight_bytes / _LOAD_BYTES_PER_SECOND)

    @property
    def needs_quantizing(self) -> bool:
        return self.weights != self.stored


def object_name(model: str) -> str:
    """A name that DNS, Kubernetes and systemd accept."""
    last = model.rstrip("/").split("/")[-1].removesuffix(".gguf")
    name = re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:40].strip("-")
    if not name:
        raise UserError(f"'{model}' gives no usable name", "give --name")
    return name if name[0].isalpha() else f"m-{name}"


def from_plan(result: Mapping[str, Any], catalog: Catalog, model: str, name: str = "") -> Serving:
    """The chosen plan of an answer; `model` is what the engine loads (the planner's name may not be a checkpoint)."""
    plan = result.get("plan")
    if not isinstance(plan, Mapping):
        raise UserError("this is not the output of a plan", "write it with `tokenmill plan ... --json > plan.json`")
    try:
        settings = plan["settings"]
        return Serving(
            model=model,
            name=object_name(name or model),
            device=calibrated_device() if is_this_machine(plan["device"]) else catalog.find_device(plan["device"]),
            tp=int(plan["tp"]),
            pp=int(plan["pp"]),
            ep=int(plan.get("ep", 1)),
            data_parallel=int(plan.get("data_parallel", 1)),
            replicas=int(plan["replicas"]),
            weights=str(plan["weights"]),
            stored=str(plan.get("stored_weights", "bf16")),
            kv_bits=float(plan["kv_bits"]),
            max_sequences=int(settings["max_num_seqs"]),
            batch_tokens=int(settings["max_num_batched_tokens"]),
            memory_share=float(settings["gpu_memory_utilization"]),
            context=int(settings["max_model_len"]),
            weight_bytes=int(plan["weight_bytes"]),
            users=int(plan["users_per_replica"]),
            draft_tokens=int(settings.get("draft_tokens", 0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the plan lacks or misstates {error}", "write it with this version of tokenmill") from None
