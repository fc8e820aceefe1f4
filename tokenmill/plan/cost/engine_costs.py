"""What each serving engine adds to its kernels, and how well each chip generation uses its roofs.

A handful of constants per engine and generation (plan/data/engines.toml), fitted with benchmarks/fit_engines.py or set
by hand over the development rows, never per model or row. Read by step_cost.py, kernel_time.py and
the closed-loop model.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.hardware.catalog import Device
from tokenmill.plan.question.engines import check_engine, engine_tables


@dataclass(frozen=True, slots=True)
class EngineCosts:
    step_ms: float  # host time per step that the device waits for
    sequence_us: float  # host time per running sequence and step
    eager_us: float  # host time per layer to launch a step that holds prompts (no captured graph)
    eager_expert_us: float  # the same for a layer with experts, which is many more launches
    layer_us: float  # small kernels of one layer
    kernel: float  # factor on the measured linear layers and attention
    experts: float  # factor on the measured expert kernels
    request_ms: float  # front end: HTTP, tokenizer, queue, first token back
    drift: float  # how far users of a fixed-length benchmark drift apart, as a spread of lengths
    mixed: bool  # prompt chunks ride with decodes; otherwise prompts stop them
    eager_latent_us: float = 0.0  # host time that latent attention adds to such a layer
    queue_steps: float = 0.0  # running steps that a request waits for outside its own prompt: front end, scheduler
    replica_queue_steps: float = 0.0  # more with replicated attention: prompts wait until all replicas have one


@dataclass(frozen=True, slots=True)
class FamilyShares:
    """Share of the roofs that a chip generation reaches, relative to the generation the tables were measured on."""

    compute: float = 1.0
    memory: float = 1.0


@dataclass(frozen=True, slots=True)
class RoofShares:
    """F13: share of bandwidth and arithmetic that an engine reaches on a device where no tables apply."""

    memory: float
    compute: float
    floor_ms: float = 0.0  # of one operation
    measured: bool = False  # the memory share comes from a published rate; otherwise both are assumed


def engine_costs(engine: str, family: str = "") -> EngineCosts:
    """The constants of an engine; a chip generation may have some of its own (its hosts, its published settings)."""
    check_engine(engine)
    tables = engine_tables()
    return EngineCosts(**tables["engine"][engine] | tables["engine_on"].get(f"{engine}/{family}", {}))


def format_factor(engine: str, family: str, bits: float, math: str) -> float:
    """Factor on the measured kernels for an engine whose kernels for a weight format are its own; 1: as measured."""
    table = engine_tables()["format_factors"].get(f"{engine}/{family}", {})
    return float(table.get("int4" if bits < 6 and math == "bf16" else math, 1.0))


def routing_skew() -> float:
    """How much more the busiest rank of placed experts has to do than the mean, in large batches."""
    return float(engine_tables()["experts"]["skew"])


def family_shares(family: str) -> FamilyShares:
    """Generations without data of their own are taken to be like the measured one."""
    return FamilyShares(**engine_tables()["family"].get(family, {}))


def roof_shares(engine: str, device_name: str, kind: str) -> RoofShares | None:
    """Shares of the roofs for this engine and device, or None where the op tables serve.

    Asked in the order: this engine on this device, this engine on this kind of device, any engine on this kind.
    """
    table = engine_tables()["roofs"]
    for key in (f"{engine}/{device_name}", f"{engine}/{kind}", f"any/{kind}"):
        if key in table:
            return RoofShares(**table[key])
    return None


def device_roofs(engine: str, device: Device) -> RoofShares | None:
    """The shares that were measured on this very device, else those of the tables."""
    if device.measured_shares:
        memory, compute = device.measured_shares
        return RoofShares(memory, compute, measured=True)
    return roof_shares(engine, device.name, device.kind)
