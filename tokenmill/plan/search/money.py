"""Money: what a million tokens cost on a plan, split by kind of token, and when that beats an API or the present bill.

Formula F15 with its surroundings: utilisation, spot price, power, facility and engineering overhead, cold starts, the
daily curve of load. Arithmetic only; prices come from the catalog or the user. Called by the search and the CLI.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import ApiPrice
from tokenmill.plan.cost.ceilings import dollars_per_million
from tokenmill.plan.cost.step_cost import StepCost
from tokenmill.plan.question.pricing import HOURS_PER_MONTH
from tokenmill.plan.question.workload import Workload


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """$ per million tokens. `blended` is over all tokens of the workload's mix."""

    uncached_input: float
    cached_input: float
    output: float
    blended: float
    hourly: float  # of the whole plan
    monthly: float


def token_costs(
    cost: StepCost, workload: Workload, output_rate: float, hourly: float, utilization: float
) -> TokenCosts:
    """Split the machine's time between prompt and output tokens by what each takes alone, then scale to the measured
    whole: the parts always add up to the bill."""
    per_output = dollars_per_million(hourly, output_rate, utilization)  # if output alone paid
    new, cached = workload.uncached_tokens, workload.input_tokens - workload.uncached_tokens
    prefill_ms = cost.step_ms([(new, cached)], (0, 0.0))
    batch = 32
    context = workload.input_tokens + workload.output_tokens / 2
    decode_ms = cost.decode_ms(batch, batch * context) / batch * workload.output_tokens
    share = prefill_ms / (prefill_ms + decode_ms)
    request = per_output * workload.output_tokens / 1e6  # $ of one request
    cached_share = _cached_share(cost, new, cached) if cached else 0.0
    uncached = 1e6 * request * share / (new + cached_share * cached)
    return TokenCosts(
        uncached_input=uncached,
        cached_input=uncached * cached_share,
        output=1e6 * request * (1 - share) / workload.output_tokens,
        blended=1e6 * request / workload.total_tokens,
        hourly=hourly,
        monthly=hourly * HOURS_PER_MONTH,
    )


def _cached_share(cost: StepCost, new: int, cached: int) -> float:
    """A cached token is not free: attention of the new ones reads it. Its price over an uncached one's."""
    with_prefix = cost.step_ms([(new, cached)], (0, 0.0))
    without = cost.step_ms([(new, 0)], (0, 0.0))
    whole = cost.step_ms([(new + cached, 0)], (0, 0.0))
    return max(0.0, min(1.0, (with_prefix - without) / max(1e-9, whole - without)))


@dataclass(frozen=True, slots=True)
class BreakEven:
    against: str
    api_blended: float  # $ per million tokens of the mix
    utilization: float  # at which self-hosting costs the same; above 1: never


def break_even(api: ApiPrice, workload: Workload, blended_at_full_load: float) -> BreakEven:
    """The load at which the plan's $ per million equals the API's, cache discount included."""
    new = workload.uncached_tokens
    cached = workload.input_tokens - new
    dollars = new * api.input + cached * api.cached_input + workload.output_tokens * api.output
    blended = dollars / workload.total_tokens
    return BreakEven(f"{api.provider} {api.model}", blended, blended_at_full_load / blended if blended else 2.0)


@dataclass(frozen=True, slots=True)
class AgainstBill:
    """A plan compared with today's bill for the same tokens. Shares are fractions; negative saves."""

    bill: float  # $ a month, today
    tokens: float  # a month, input and output
    bill_per_million: float
    plan_per_month: float
    change: float  # of the monthly cost
    break_even_tokens: float  # a month, at which both cost the same
    possible: bool  # the plan can serve as many


def against_bill(bill: float, tokens: float, costs: TokenCosts, utilization: float) -> AgainstBill:
    """`tokens` that the bill pays for, 0: as many as the plan serves at its mean load."""
    if bill <= 0 or tokens < 0:
        raise UserError(f"a bill of ${bill:g} for {tokens:g} tokens", "give --current-bill above 0 dollars a month")
    served = 1e6 * costs.monthly / costs.blended  # at the mean load
    tokens = tokens or served
    per_million = 1e6 * bill / tokens
    break_even_tokens = 1e6 * costs.monthly / per_million
    capacity = served / utilization
    return AgainstBill(
        bill, tokens, per_million, costs.monthly, costs.monthly / bill - 1, break_even_tokens,
        max(tokens, break_even_tokens) <= capacity,
    )  # fmt: skip
