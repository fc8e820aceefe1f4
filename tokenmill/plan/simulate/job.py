"""One simulation from end to end: deployment and workload in, numbers out.

Joins the memory model (shape), the cost model and the cluster. Called by `tokenmill simulate`, the search and the
calibration's check; the only file here that knows what a deployment is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenmill.errors import UserError
from tokenmill.hardware.memory import sequence_bytes
from tokenmill.plan.cost.step_cost import StepCost
from tokenmill.plan.question.deployment import PAGE_SIZE, Deployment
from tokenmill.plan.simulate.autoscaler import Autoscaling
from tokenmill.plan.simulate.cluster import Cluster, ClusterSettings, PoolSettings
from tokenmill.plan.simulate.engine_shape import EngineShape, shape_of
from tokenmill.plan.simulate.records import Records
from tokenmill.plan.simulate.report import OutsideEngine, Simulation, summarize
from tokenmill.plan.simulate.runner import CostModel
from tokenmill.plan.simulate.workload import Workload

_SLOWEST_LINK_GB_S = 12.5  # where the catalog knows none: a 100 Gbit/s network


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """How many engines there are and how requests reach them."""

    replicas: int = 1
    router: str = "round_robin"
    prefill_replicas: int = 0  # with decode_replicas: disaggregated pools instead of `replicas`
    decode_replicas: int = 0
    link_gb_s: float = 0.0  # of one device for KV transfers; 0: its network, else PCIe
    autoscaling: Autoscaling | None = None
    prefix_caching: bool = True
    strides: bool = True

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise UserError(f"replicas is {self.replicas}", "give at least 1")
        if (
            bool(self.prefill_replicas) != bool(self.decode_replicas)
            or min(self.prefill_replicas, self.decode_replicas) < 0
        ):
            raise UserError(
                f"{self.prefill_replicas} prefill and {self.decode_replicas} decode replicas",
                "give at least one of each, or neither",
            )
        if self.link_gb_s < 0:
            raise UserError(f"a link of {self.link_gb_s:g} GB/s", "give a number above 0")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for goodput in milliseconds; 0: none. `keep_itl`: the scheduler keeps it, as `serve --itl` does."""

    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    keep_itl: bool = False

    def __post_init__(self) -> None:
        if self.keep_itl and not self.itl_ms:
            raise UserError("there is no limit to keep", "give --itl with --keep-itl")
        for name in ("ttft_ms", "itl_ms"):
            if getattr(self, name) < 0:
                raise UserError(f"the limit {name} is {getattr(self, name):g}", "give milliseconds above 0")


def simulate(
    deployment: Deployment,
    workload: Workload,
    fleet: FleetOptions = FleetOptions(),
    limits: Limits = Limits(),
    context: int = 0,
    cost: StepCost | None = None,
) -> Simulation:
    """Simulate `workload` on engines of this deployment."""
    cost = cost or StepCost(deployment)
    engine = SimulatedEngine(
        shape_of(deployment, context),
        cost,
        cost.costs.request_ms,
        deployment.devices / deployment.pp,
        deployment.pp,
        0.0 if fleet.prefill_replicas else cost.queue_steps,  # prompts of split pools meet no decode steps
    )
    return simulate_engine(engine, workload, fleet, limits, _transfer(deployment, fleet.link_gb_s))


@dataclass(frozen=True, slots=True)
class TransferTime:
    """Milliseconds to move a prompt's KV: every device sends its own share at once."""

    deployment: Deployment | None = None
    gb_s: float = _SLOWEST_LINK_GB_S
    latency_ms: float = 1.0

    def __call__(self, tokens: int) -> float:
        if self.deployment is None:
            return self.latency_ms
        d = self.deployment
        size = sequence_bytes(d.model.kv_needs(d.tp, d.kv_bytes), tokens, PAGE_SIZE) / d.pp
        return self.latency_ms + size / (self.gb_s * 1e6)


def _transfer(deployment: Deployment, link_gb_s: float) -> TransferTime:
    device = deployment.device
    return TransferTime(deployment, link_gb_s or device.network_gb_s or device.pcie_gb_s or _SLOWEST_LINK_GB_S)


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """What a cluster is made of. `loops`: engine loops of one replica (pipeline stages in flight)."""

    shape: EngineShape
    cost: CostModel
    request_ms: float
    devices: float = 1.0  # of one loop
    loops: int = 1
    queue_steps: float = 0.0  # steps of the running batch that a request waits for outside the loop


def simulate_engine(
    engine: SimulatedEngine,
    workload: Workload,
    fleet: FleetOptions = FleetOptions(),
    limits: Limits = Limits(),
    transfer: TransferTime = TransferTime(),
) -> Simulation:
    if limits.keep_itl:
        engine = replace(engine, shape=replace(engine.shape, itl=limits.itl_ms))
    cluster = run_cluster(engine, workload, fleet, transfer)
    records, replicas = cluster.records, cluster.replicas
    outside = OutsideEngine(engine.request_ms, engine.queue_steps * _met_running(records, len(replicas)))
    return summarize(records, replicas, outside, engine.devices, limits.ttft_ms, limits.itl_ms)


def _met_running(records: Records, num_replicas: int) -> float:
    """Share of the requests that meet a running step, as in `estimate`: all but one of those in flight at a replica."""
    done = records.finished
    span = max(record.last for record in done) - min(record.sent for record in done)
    in_flight = sum(record.e2e_ms for record in done) / max(span, 1e-9) / num_replicas
    return max(0.0, 1 - 1 / in_flight) if in_flight else 0.0


def run_cluster(
    engine: SimulatedEngine,
    workload: Workload,
    fleet: FleetOptions = FleetOptions(),
    transfer: TransferTime = TransferTime(),
) -> Cluster:
    """A finished cluster, for those who need single requests; at least one was answered."""
    split = fleet.prefill_replicas > 0
    if fleet.autoscaling and engine.loops > 1:
        raise UserError("autoscaling of engines with pipeline stages is not simulated", "use --pp 1, or no --autoscale")
    serving = fleet.prefill_replicas if split else fleet.replicas
    settings = ClusterSettings(
        serve=PoolSettings(engine.shape, engine.cost, serving * engine.loops, engine.loops),
        router=fleet.router,
        prefix_caching=fleet.prefix_caching,
        autoscaling=fleet.autoscaling,
        decode=PoolSettings(engine.shape, engine.cost, fleet.decode_replicas * engine.loops, engine.loops)
        if split
        else None,
        transfer_ms=transfer,
        strides=fleet.strides,
    )
    cluster = Cluster(settings, workload)
    records = cluster.run()
    if not records.finished:
        context = engine.shape.context
        problem = (
            f"all {records.refused} requests are longer than {context} tokens" if records.refused else "no request"
        )
        raise UserError(f"nothing to simulate: {problem}", "give a longer --context or another trace")
    return cluster
