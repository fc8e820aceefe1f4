"""The results as plain records: runs, speeds, qualities, latencies, predictions and the verdict on each candidate.

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

TIE_MARGIN = 0.01  # costs that differ by less count as equal


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
    """One replay of the arrivals through the serving path. Goodput: tokens that came within the objectives."""

    requests: int
    failed: int
    offered_requests_s: float
    duration_s: float
    ttft_ms: Percentiles
    itl_ms: Percentiles
    e2e_ms: Percentiles
    output_tok_s: float
    goodput_tok_s: float
    attainment: float  # share of the output tokens within the objectives; those of failed requests are not
    objective_met: bool
    refusal: str = ""  # which objective is missed, and by how much
    ttft_curve_ms: tuple[float, ...] = ()  # 21 quantiles over the requests: 0 %, 5 %, ... 100 %
    itl_curve_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Sustained:
    """The highest rate that keeps the objectives. `low`, `high`: of the goodput, between that rate and the lowest one
    that was seen to miss them; infinite where none was."""

    latency: Latency
    low: float
    high: float

    @property
    def range(self) -> tuple[float, float] | None:
        """None: the search ended before a rate was too high."""
        return (self.low, self.high) if self.high < float("inf") else None


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
    note: str = ""  # such as too few items to show that a loss is within the limit


@dataclass(frozen=True, slots=True)
class Check:
    """A property of generated text, or of a long context: the candidate's figure beside the baseline's."""

    name: str
    value: float
    reference: float
    limit: float
    refusal: str = ""
    note: str = ""  # such as why it was skipped


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
    bits: float = 0.0  # per weight of the blocks; 0: not known


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
    sustained: Latency | None = None  # at the highest rate that keeps the objectives: its goodput decides the cost
    goodput_range: tuple[float, float] | None = None  # of that goodput: how well the highest rate is known
    rounds: int = 0  # of halving that it was measured in
    dollars_per_million_output: float | None = None
    engine_version: str = ""  # of a rival
    command: str = ""  # that a rival or today's server was started with
    quality_method: str = ""  # how a server's quality was measured: "prompt" | "generated" | "answers"

    @property
    def goodput_tok_s(self) -> float | None:
        """Output tokens a second of the requests within the objectives, at the highest rate known; None: no replay."""
        replayed = self.sustained or self.latency
        return replayed.goodput_tok_s if replayed else None

    @property
    def output_tok_s(self) -> float | None:
        """Of the replay where there was one, else of the throughput runs."""
        replayed = self.sustained or self.latency
        return replayed.output_tok_s if replayed else self.speed.output_tok_s if self.speed else None


@dataclass(frozen=True, slots=True)
class Saving:
    """Share of the cost of a token that is saved. `low` and `high`: 95 % interval of alternating runs, or what the
    search for the highest rate leaves open; None: from one replay each."""

    share: float
    low: float | None = None
    high: float | None = None


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
    made_up: bool = False  # weights of the shape in config.json: speeds only
    max_kld: float | None = None
    max_task_loss: float = 0.02
    unproven: list[str] = field(default_factory=list)  # cheaper than the chosen one, and not proven in the time given
    margin: float = 0.0  # of its cost, by which another finalist may be cheaper than the chosen one
    device: str = "cpu"
    date: str = ""  # of the end of the run, ISO 8601
    seed: int = 0
    versions: dict[str, str] = field(default_factory=dict)  # package or engine -> version
    files: dict[str, str] = field(default_factory=dict)  # written beside the report, name -> text: serve.yaml, ...

    @property
    def saving(self) -> Saving | None:
        """Of the chosen candidate, against the unquantized weights on the fastest path."""
        return saving(self.chosen, self.baseline, bool(self.objectives))

    @property
    def saving_today(self) -> Saving | None:
        """Of the chosen candidate, against the checkpoint as it is served today."""
        return saving(self.chosen, self.today, bool(self.objectives))

    @property
    def cost_reduction(self) -> float:
        found = self.saving
        return found.share if found else 0.0

    @property
    def cost_reduction_today(self) -> float | None:
        """None where nothing is served today, or where it could not be measured."""
        if self.chosen is None:
            return 0.0 if self.today else None
        found = self.saving_today
        return found.share if found else None

    @property
    def quality_loss(self) -> float | None:
        return self.chosen.quality.loss if self.chosen and self.chosen.quality else None

    @property
    def target_met(self) -> bool:
        return self.chosen is not None and self.cost_reduction >= -self.target_cost

    @property
    def objective_met(self) -> bool | None:
        """Of what would be served: the chosen candidate, else the baseline. None: no objective, or no replay of it."""
        served = self.chosen or self.baseline
        if not self.objectives or served is None or served.latency is None:
            return None
        return served.latency.objective_met

    @property
    def winner(self) -> CandidateResult | None:
        """The cheapest of the chosen candidate and the rivals that were accepted, whoever made it. A rival that was
        not measured in the same way as the chosen candidate cannot win."""
        accepted = [each for each in self.rivals if each.verdict in (CHOSEN, TIED, PASSED)]
        best = self.chosen or (accepted[0] if accepted else None)
        for each in accepted:
            found = saving(each, best, bool(self.objectives))
            if found is not None and found.share > 0:
                best = each
        return best


def saving(result: CandidateResult | None, reference: CandidateResult | None, in_objective: bool) -> Saving | None:
    """Of measurements of one kind only: by goodput under the same arrivals (`in_objective`), else by the throughputs
    that alternated with one baseline, else by the same replay. None: there is no such pair."""
    if result is None or reference is None:
        return None
    if in_objective and (found := _saving_in_objective(result, reference)) is not None:
        return found
    if result.speed and reference.speed:
        a, b = result.speed, reference.speed
        # The quotient of two intervals over the same baseline: wider than the truth, since their noise is shared.
        return Saving(1 - a.cost_ratio / b.cost_ratio, 1 - a.high / b.low, 1 - a.low / b.high)
    if result.latency and reference.latency and result.latency.output_tok_s > 0:
        return Saving(1 - reference.latency.output_tok_s / result.latency.output_tok_s)
    return None


def _saving_in_objective(result: CandidateResult, reference: CandidateResult) -> Saving | None:
    """By goodput: at the rates that both sustain, else under the same arrivals."""
    if result.sustained and reference.sustained:
        mine, theirs = result.sustained.goodput_tok_s, reference.sustained.goodput_tok_s
        ranges = result.goodput_range, reference.goodput_range
        if mine > 0 and theirs > 0:
            (low, high), (their_low, their_high) = ranges[0] or (mine, mine), ranges[1] or (theirs, theirs)
            return Saving(1 - theirs / mine, *((1 - their_high / low, 1 - their_low / high) if all(ranges) else ()))
    if result.latency and reference.latency and result.latency.goodput_tok_s > 0:
        return Saving(1 - reference.latency.goodput_tok_s / result.latency.goodput_tok_s)
    return None
