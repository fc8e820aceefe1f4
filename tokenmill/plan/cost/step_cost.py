"""Milliseconds of one engine step: the interface between the performance model and everything that simulates.

`StepCost` adds up kernel curves prepared once per deployment, so that a call costs a few microseconds and no numpy: a
trace of 20,000 requests asks millions of times. Knows nothing of queues or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import sqrt

from tokenmill.checkpoint.matrices import Matrix
from tokenmill.checkpoint.mixers import Attention, Mixer, Recurrent
from tokenmill.plan.cost import kernel_time
from tokenmill.plan.cost.communication import all_reduce_ms, all_to_all_ms, hand_over_ms
from tokenmill.plan.cost.curves import Curve, Surface, sampled
from tokenmill.plan.cost.engine_costs import (
    EngineCosts,
    RoofShares,
    device_roofs,
    engine_costs,
    format_factor,
    routing_skew,
)
from tokenmill.plan.question.deployment import Deployment
from tokenmill.plan.question.planned_model import LayerKind

Decode = list[int] | tuple[int, float]
_KEPT_CHUNKS = 1 << 12


@dataclass(frozen=True, slots=True)
class StepParts:
    """Where the milliseconds of a step go."""

    linear: float
    experts: float
    attention: float
    communication: float
    small: float
    host: float
    launches: float = 0.0  # the device waiting for an uncaptured prompt step to be launched

    @property
    def total(self) -> float:
        return self.linear + self.experts + self.attention + self.communication + self.small + self.host + self.launches


class StepCost:
    """`step_ms(prefill, decode)`: prefill as [(new tokens, context before them)], decode as a list of contexts or
    as the tuple (count, total context)."""

    def __init__(self, deployment: Deployment, costs: EngineCosts | None = None) -> None:
        self.deployment = d = deployment
        self.costs = costs or engine_costs(d.engine, d.device.family)
        self._roofs = device_roofs(d.engine, d.device)
        self._format = format_factor(d.engine, d.device.family, d.weights.bits, d.weights.math)
        self._dp = float(d.data_parallel)
        layers = [curve for kind in d.model.layers for curve in self._layer_linears(kind)]
        self._linear = _summed(layers)
        self._head = self._matrix_curve(Matrix("lm_head", "head", d.model.hidden_size, d.model.vocab_size), 1)
        self._experts = _summed([self._expert_curve(kind) for kind in d.model.layers if kind.feed_forward.num_experts])
        self._communication = sampled(self._exchange_ms, kernel_time.TOKENS)
        self._small = sampled(self._small_ms, kernel_time.TOKENS)
        self._attention = self._attention_times(d)
        self._weigh(self.costs)

    @property
    def queue_steps(self) -> float:
        """Steps of the running batch that a request waits for besides its own prompt and those before it."""
        return self.costs.queue_steps + (self.costs.replica_queue_steps if self._dp > 1 else 0.0)

    def decode_ms(self, count: int, total_context: float) -> float:
        return self.step_ms((), (count, total_context))

    def verify_ms(self, count: int, total_context: float, draft_tokens: int) -> float:
        """A step that checks `draft_tokens` drafts of each sequence: more rows in every matrix, the same KV read."""
        rows = count * (draft_tokens + 1)
        plain = self.step_ms((), (count, total_context))
        wider = self._tokens(rows) - self._tokens(count)
        return plain + wider + self._kernel * (self._head(rows / self._dp) - self._head(count / self._dp))

    def with_costs(self, costs: EngineCosts) -> StepCost:
        """The same kernels under another engine's constants (what benchmarks/fit_engines.py varies)."""
        other = copy(self)
        other._weigh(costs)
        return other

    def with_kv(self, deployment: Deployment) -> StepCost:
        """Same model, devices and parallelism with another KV width or other batch limits: only attention differs."""
        other = copy(self)
        other.deployment = deployment
        other._attention = other._attention_times(deployment)
        return other

    def _weigh(self, costs: EngineCosts) -> None:
        self.costs, self._kernel = costs, costs.kernel * self._format
        self._layers_ms = costs.layer_us * self.deployment.model.num_layers / 1e3
        routed = sum(kind.count for kind in self.deployment.model.layers if kind.feed_forward.num_experts)
        plain = self.deployment.model.num_layers - routed
        latent = sum(kind.count for kind in self.deployment.model.layers if "latent" in {m.kind for m in kind.mixers})
        eager_us = plain * costs.eager_us + routed * costs.eager_expert_us + latent * costs.eager_latent_us
        self._eager_ms = eager_us / 1e3
        self._tokens = sampled(self._token_ms, kernel_time.TOKENS)

    def step_ms(self, prefill: Sequence[tuple[int, int]], decode: Decode) -> float:
        """The same as `parts(...).total`, without the bookkeeping."""
        count, context = _counted(decode)
        tokens = count + sum([new for new, _ in prefill]) if prefill else count
        sequences = count + len(prefill)
        if not tokens:
            return 0.0
        costs = self.costs
        mixers = 0.0
        for times in self._attention:
            mixers += times(prefill, count, context)
        device = self._tokens(tokens) + self._kernel * (self._head(sequences / self._dp) + mixers)
        if prefill and device < self._eager_ms:
            device = self._eager_ms
        return device + costs.step_ms + costs.sequence_us * sequences / 1e3

    def _token_ms(self, tokens: float) -> float:
        """Everything that depends on the number of tokens alone."""
        rank_tokens = max(1.0, tokens / self._dp)
        experts = self.costs.experts * self._experts(tokens) if self._experts else 0.0
        return (
            self._kernel * self._linear(rank_tokens)
            + experts
            + self._communication(tokens)
            + self._small_total(rank_tokens)
        )

    def _small_total(self, rank_tokens: float) -> float:
        return self._layers_ms + self._small(rank_tokens)

    def parts(self, prefill: Sequence[tuple[int, int]], decode: Decode) -> StepParts:
        count, context = _counted(decode)
        tokens = count + sum([new for new, _ in prefill])
        if tokens == 0:
            return StepParts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        rank_tokens = max(1.0, tokens / self._dp)
        sequences = count + len(prefill)
        kernel = self._kernel
        attention = sum([times(prefill, count, context) for times in self._attention])
        parts = StepParts(
            linear=kernel * (self._linear(rank_tokens) + self._head(max(1.0, sequences / self._dp))),
            experts=self.costs.experts * self._experts(tokens) if self._experts else 0.0,
            attention=kernel * attention,
            communication=self._communication(tokens),
            small=self._small_total(rank_tokens),
            host=self.costs.step_ms + self.costs.sequence_us * sequences / 1e3,
        )
        waiting = self._eager_ms - (parts.total - parts.host) if prefill else 0.0
        return replace(parts, launches=max(0.0, waiting))

    def _matrix_curve(self, matrix: Matrix, count: int) -> Curve:
        d = self.deployment
        outputs, inputs = matrix.shard(d.tp)
        bits = d.weights.bits_for(matrix.part, matrix.split)
        curve = kernel_time.linear_curve(d.device, d.weights, bits, outputs, inputs, self._roofs)
        return sampled(lambda tokens: count * curve(tokens), kernel_time.TOKENS)

    def _layer_linears(self, kind: LayerKind) -> list[Curve]:
        parts = ("attention", "mlp", "shared")
        return [self._matrix_curve(matrix, kind.count) for matrix in kind.matrices() if matrix.part in parts]

    def _expert_curve(self, kind: LayerKind) -> Curve:
        d = self.deployment
        curve = kernel_time.expert_curve(
            d.device, d.weights, d.model.hidden_size, kind.feed_forward, d.expert_tp, d.ep, self._roofs
        )
        per_token, skew = kind.feed_forward.experts_per_token, routing_skew()

        def ms(tokens: float) -> float:
            return kind.count * curve(tokens * kernel_time.uneven(tokens, per_token, d.ep, skew))

        return sampled(ms, kernel_time.TOKENS)

    def _exchange_ms(self, tokens: float) -> float:
        """Two all-reduces per layer; with replicated attention, experts' inputs and outputs travel between replicas."""
        d, hidden = self.deployment, self.deployment.model.hidden_size
        per_rank = tokens / d.data_parallel
        once = all_reduce_ms(per_rank * hidden * 2, d.tp, d.device)
        total = 0.0
        for kind in d.model.layers:
            total += kind.count * once * (1 if kind.feed_forward.num_experts and d.data_parallel > 1 else 2)
            if kind.feed_forward.num_experts and d.data_parallel > 1:
                k = kind.feed_forward.experts_per_token
                total += kind.count * all_to_all_ms(per_rank, min(k, d.group), hidden, 1.5, d.group, d.device)
        return total + (d.pp - 1) * hand_over_ms(tokens, hidden, d.device)

    def _small_ms(self, tokens: float) -> float:
        """The bytes that norms, rotary embedding, activation and quantization move (their launches: `layer_us`)."""
        d, hidden = self.deployment, self.deployment.model.hidden_size
        total = 0.0
        for kind in d.model.layers:
            ffn = kind.feed_forward
            width = ffn.intermediate_size or ffn.experts_per_token * ffn.expert_size / d.data_parallel
            moved = 2.0 * tokens * (10 * hidden + (4 * width + 4 * kind.mixer_width) / d.tp)
            total += kind.count * moved / (0.6 * d.device.bandwidth_gb_s * 1e6)
        return total

    def _attention_times(self, d: Deployment) -> list[_AttentionTimes]:
        return [_AttentionTimes(mixer, kind.count, d, self._roofs) for kind in d.model.layers for mixer in kind.mixers]


class _AttentionTimes:
    """Milliseconds of one mixer of one kind of layer in a step."""

    __slots__ = ("_count", "_decode", "_dp", "_floor", "_prefill", "_recurrent", "_window", "_work")

    def __init__(self, mixer: Mixer, count: int, d: Deployment, roofs: RoofShares | None) -> None:
        self._count, self._dp = count, d.data_parallel
        self._window = mixer.window or mixer.chunk if isinstance(mixer, Attention) else 0
        self._recurrent: Callable[[float], float] | None = None
        self._decode: Surface | None = None
        self._prefill: Curve | None = None
        if isinstance(mixer, Recurrent):
            self._recurrent = kernel_time.recurrent_curve(d.device, mixer, d.tp)
        else:
            self._decode = kernel_time.decode_surface(d.device, mixer, d.tp, d.kv_bytes, roofs)
            self._prefill = kernel_time.prefill_curve(d.device, mixer, d.tp, d.kv_bytes, roofs)
            self._floor = self._prefill(1.0)
        self._work: dict[tuple[int, int], float] = {}  # by chunk: many prompts are equal

    def __call__(self, prefill: Sequence[tuple[int, int]], count: int, context: float) -> float:
        if self._recurrent is not None:  # a prompt passes in blocks of 64 tokens, each like one step of the state
            blocks = count + sum([-(-new // 64) for new, _ in prefill])
            return self._count * self._recurrent(blocks / self._dp)
        assert self._decode is not None
        total = 0.0
        if count:
            mean = context / count
            if self._window and mean > self._window:
                mean = float(self._window)
            total += self._decode(max(1.0, count / self._dp), mean)
        if prefill:
            known = self._work
            work = [known[chunk] if chunk in known else self._chunk_ms(chunk) for chunk in prefill]
            total += self._floor + sum(work) / min(self._dp, len(prefill))
        return total * self._count

    def _chunk_ms(self, chunk: tuple[int, int]) -> float:
        """Attention of one prompt chunk, without the launch."""
        assert self._prefill is not None
        ms = self._prefill(equivalent_length(*chunk, self._window)) - self._floor
        if len(self._work) < _KEPT_CHUNKS:
            self._work[chunk] = ms
        return ms


def equivalent_length(new: int, before: int, window: int = 0) -> float:
    """The length of a whole prompt with as much attention work as `new` tokens after `before` others."""
    seen = min(before, window) if window else before
    own = min(new, window) if window else new
    return sqrt(2.0 * new * seen + (2.0 * new - own) * own)


def _counted(decode: Decode) -> tuple[int, float]:
    """(sequences, total context); a tuple is already counted, a list holds one context per sequence."""
    if isinstance(decode, tuple):
        return int(decode[0]), float(decode[1])
    return len(decode), float(sum(decode))


def _summed(curves: Sequence[Curve]) -> Curve:
    return sampled(lambda tokens: sum(curve(tokens) for curve in curves), kernel_time.TOKENS)
