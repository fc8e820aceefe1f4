"""Split pools: engines that only compute prompts, engines that only decode, and the KV cache sent between them.

A closed form for users of a benchmark or drifted apart; the simulator's pools answer for traces. Knows nothing of how a
plan is chosen. Called by performance.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tokenmill.plan.cost.closed_loop import Load
from tokenmill.plan.cost.step_cost import StepCost
from tokenmill.plan.question.deployment import Deployment, room_for
from tokenmill.plan.question.planned_model import PlannedModel

_ROUNDS = 12
_BUSIEST = 0.95
_BALANCED = 0.5  # how busy pools of unknown size keep their prefill engines


@dataclass(frozen=True, slots=True)
class SplitDeployment:
    prefill: Deployment  # one engine of the pool
    decode: Deployment
    num_prefill: int = 0  # engines; 0: as many as keep up with the decoding ones
    num_decode: int = 1

    @property
    def model(self) -> PlannedModel:
        return self.decode.model

    @property
    def engine(self) -> str:
        return self.decode.engine

    @property
    def devices(self) -> int:
        return max(1, self.num_prefill) * self.prefill.devices + self.num_decode * self.decode.devices

    @property
    def parallelism(self) -> str:
        return f"{self.num_prefill or '?'}x{self.prefill.parallelism}+{self.num_decode}x{self.decode.parallelism}"


@dataclass(frozen=True, slots=True)
class SplitState:
    ttft_ms: float
    tpot_ms: float
    output_tok_s: float
    saturated: bool


def split_state(deployment: SplitDeployment, prefill: StepCost, decode: StepCost, load: Load, cold: bool) -> SplitState:
    """`cold`: mean over a benchmark whose users all start at once, `load.rounds` requests each."""
    d = deployment
    mean = 1.0 - load.spread / 2
    prompt, output = max(1, round(load.input_tokens * mean)), max(2.0, load.output_tokens * mean)
    own = _prompt_ms(prefill, d.prefill, prompt, load.cached_tokens)
    alone = own + transfer_ms(d, prompt) + prefill.costs.request_ms + decode.costs.request_ms
    fit = room_for(d.decode, load.mean_tokens).sequences * d.num_decode
    ttft, tpot, running = alone, 0.0, float(min(load.concurrency, fit))
    context = load.cached_tokens + prompt + output / 2
    full = running / d.num_decode
    cycle = alone + output * decode.decode_ms(max(1, round(full)), full * context)
    engines = d.num_prefill or max(1, ceil(load.concurrency * own / (_BALANCED * cycle)))
    queue = load.concurrency / engines  # prompts that one engine computes when all come at once
    for _ in range(_ROUNDS):
        batch = max(1.0, running / d.num_decode)
        tpot = decode.decode_ms(round(batch), batch * context)
        cycle = max(alone + output * tpot, queue * own)
        busy = min(_BUSIEST, queue * own / cycle)
        ttft = max(alone + own * busy / (2 * (1 - busy)), cycle - output * tpot)
        running = min(float(fit), load.concurrency * output * tpot / (output * tpot + ttft))
    if cold:
        share = 1.0 / load.rounds
        ttft = share * (alone + own * (queue - 1) / 2) + (1 - share) * ttft
    rate = 1e3 * load.concurrency * output / (output * tpot + ttft)
    return SplitState(ttft, tpot, rate, load.concurrency > fit)


def transfer_ms(deployment: SplitDeployment, tokens: int) -> float:
    """The KV cache of a prompt over the network of the devices that hold it."""
    d = deployment.prefill
    nbytes = d.model.kv_bytes_per_token(d.tp, d.kv_bytes) * tokens
    return nbytes / (max(1.0, d.device.network_gb_s or d.device.pcie_gb_s) * 1e6)


def _prompt_ms(cost: StepCost, deployment: Deployment, tokens: int, cached: int) -> float:
    """One prompt, in chunks of a step; attention replicas compute as many at once."""
    total, done = 0.0, 0
    while done < tokens:
        new = min(deployment.batch_tokens, tokens - done)
        total += cost.step_ms([(new, cached + done)] * deployment.data_parallel, (0, 0.0))
        done += new
    return total / deployment.data_parallel
