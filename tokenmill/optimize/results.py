"""The results as plain records: runs, speeds, qualities, predictions and the verdict on each candidate.

Everything here turns into JSON by `asdict` and back by its constructor: results.json and the store are made of it.
Knows nothing of how anything is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Verdicts, in the order the report lists them.
CHOSEN = "chosen"
TIED = "tied"
PASSED = "passed"  # kept its quality, costs more
SLOWER = "slower"  # dropped by a round of halving
HARMED = "harmed"  # lost more quality than allowed, or could not be shown to be within the limit
UNLIKELY = "unlikely"  # dropped by the planner
FAILED = "failed"
UNTRIED = "untried"  # no time was left


@dataclass(frozen=True, slots=True)
class Run:
    """One timed pass of the workload."""

    elapsed_s: float
    output_tok_s: float
    total_tok_s: float
    ttft_ms: float  # median over requests
    tpot_ms: float
    memory_bytes: int = 0  # weights, and KV pages for the workload's concurrency


@dataclass(frozen=True, slots=True)
class Speed:
    """Relative to the baseline runs that alternated with these. `cost_ratio`: cost of a token over the baseline's."""

    cost_ratio: float
    low: float  # 95 % interval
    high: float
    runs: int
    output_tok_s: float
    total_tok_s: float
    ttft_ms: float
    tpot_ms: float
    memory_bytes: int = 0

    @property
    def cost_reduction(self) -> float:
        return 1 - self.cost_ratio


@dataclass(frozen=True, slots=True)
class Quality:
    loss: float  # perplexity ratio - 1
    loss_low: float  # two-sided 95 %
    loss_high: float
    kld_mean: float
    kld_p99: float
    top1_agreement: float
    perplexity: float
    reference_perplexity: float
    tokens: int
    nan_count: int
    stderr: float


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Latency:
    """One replay of the arrivals through the serving path. Goodput: tokens of the requests within the objective."""

    requests: int
    failed: int
    offered_requests_s: float
    duration_s: float
    ttft_ms: Percentiles
    itl_ms: Percentiles
    e2e_ms: Percentiles
    output_tok_s: float
    goodput_tok_s: float
    attainment: float  # share of the requests within the objective
    objective_met: bool
    refusal: str = ""  # which objective is missed, and by how much


@dataclass(frozen=True, slots=True)
class TaskScore:
    """A task by both models, paired by item."""

    name: str
    items: int
    accuracy: float
    reference_accuracy: float
    low: float  # 95 % interval of accuracy - reference_accuracy, by bootstrap over items
    high: float
    p_value: float  # McNemar's exact test


@dataclass(frozen=True, slots=True)
class Check:
    """A property of generated text, or of a long context: the candidate's figure beside the baseline's."""

    name: str
    value: float
    reference: float
    limit: float
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Proof:
    """All that is known of a candidate's quality. `refusals`: why it is not accepted, empty if it is."""

    quality: Quality | None
    tasks: tuple[TaskScore, ...] = ()
    checks: tuple[Check, ...] = ()
    refusals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prediction:
    speedup: float  # over the baseline
    weight_bytes: int
    quality_low: float  # share of quality lost, published range
    quality_high: float
    basis: str
    speed_class: str = ""  # candidates of equal class run the same kernels on as many bytes: they cost the same


@dataclass(frozen=True, slots=True)
class Artefact:
    path: str
    nbytes: int
    bits_per_weight: float
    seconds: float
    command: str  # that makes it
    layers: tuple[dict[str, Any], ...] = ()  # name, type_name, relative_error


@dataclass(slots=True)
class CandidateResult:
    name: str
    weights: str
    kv: str
    batch_tokens: int
    speculate: str = "off"
    options: dict[str, Any] = field(default_factory=dict)  # further fields of EngineConfig, such as prefix_caching
    engine: str = "tokenmill"  # or a rival's name
    verdict: str = UNTRIED
    reason: str = ""
    prediction: Prediction | None = None
    artefact: Artefact | None = None
    divergence: Quality | None = None  # on the short text
    quality: Quality | None = None  # on the whole text
    tasks: tuple[TaskScore, ...] = ()
    checks: tuple[Check, ...] = ()
    speed: Speed | None = None
    latency: Latency | None = None  # under the arrivals of the traffic
    rounds: int = 0  # of halving that it was measured in
    dollars_per_million_output: float | None = None


@dataclass(slots=True)
class Outcome:
    model: str
    state: str  # "complete" | "out of time" | "interrupted"
    source: str
    source_note: str
    workload: dict[str, Any]
    workload_words: str
    machine: str
    price: float
    price_basis: str
    target_cost: float
    max_quality_loss: float
    quality_text: str
    seconds: float
    baseline: CandidateResult | None
    baseline_variants: list[CandidateResult]
    candidates: list[CandidateResult]
    chosen: CandidateResult | None = None
    tied: list[str] = field(default_factory=list)
    reason: str = ""
    projections: list[dict[str, Any]] = field(default_factory=list)
    launch_lines: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    disk_bytes: int = 0
    source_quantized: bool = False
    today: CandidateResult | None = None  # the checkpoint as it is served today
    rivals: list[CandidateResult] = field(default_factory=list)
    objectives: str = ""  # as given, such as "ttft p95=500ms, itl p95=40ms"; empty: throughput decides
    quality_off: bool = False
    unproven: list[str] = field(default_factory=list)  # cheaper than the chosen one, and not proven in the time given

    @property
    def cost_reduction(self) -> float:
        return self.chosen.speed.cost_reduction if self.chosen and self.chosen.speed else 0.0

    @property
    def quality_loss(self) -> float | None:
        return self.chosen.quality.loss if self.chosen and self.chosen.quality else None

    @property
    def target_met(self) -> bool:
        return self.chosen is not None and self.cost_reduction >= -self.target_cost
