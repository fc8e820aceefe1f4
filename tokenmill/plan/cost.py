"""Money: what a million tokens cost on a plan, split by kind of token, and when that beats an API or the present bill.

Formula F15 with its surroundings: utilisation, spot price, power, facility and engineering overhead, cold starts, the
daily curve of load. Arithmetic only; prices come from the catalog or the user. Called by the search and the CLI.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import ApiPrice, Device
from tokenmill.plan.ceilings import dollars_per_million, power_dollars_per_hour
from tokenmill.plan.step_cost import StepCost
from tokenmill.plan.workload import Workload

HOURS_PER_MONTH = 730.0


@dataclass(frozen=True, slots=True)
class Pricing:
    """How a device-hour is paid. `price` (of one device) overrides the catalog; owned devices pay power instead of rent
    when `price` is their depreciation."""

    price: float | None = None  # $ per device and hour
    spot_discount: float = 0.0  # 0.6: spot costs 40 % of the price
    utilization: float = 0.5  # mean load over capacity, over the month: the daily curve is in here
    overhead: float = 0.0  # facility (space, network, spares), as a share of the hardware cost
    engineering: float = 0.0  # $ a month for the people who run it, whatever the number of devices
    power: bool = False  # add power (owned machines)
    pue: float = 1.4
    dollars_per_kwh: float = 0.10
    cold_starts_per_day: float = 0.0  # per replica: hours paid before tokens flow
    cold_start_minutes: float = 5.0

    def __post_init__(self) -> None:
        if (self.price is not None and self.price < 0) or min(self.dollars_per_kwh, self.engineering) < 0:
            raise UserError("a price is negative", "give dollars of at least 0")
        if min(self.cold_starts_per_day, self.cold_start_minutes) < 0:
            raise UserError("cold starts are negative", "give --cold-starts and --cold-start-minutes of at least 0")
        if not 0 < self.utilization <= 1 or not 0 <= self.spot_discount < 1 or self.overhead < 0 or self.pue < 1:
            raise UserError(
                "utilization must be in (0, 1], spot discount in [0, 1), overhead at least 0, PUE at least 1",
                "correct the pricing options",
            )

    def fleet_hour(self, device: Device, devices: int) -> float:
        """$ for one hour of a plan."""
        return devices * self.device_hour(device) + self.engineering / HOURS_PER_MONTH

    def device_hour(self, device: Device) -> float:
        """$ for one hour of one device, everything included."""
        return sum(self.hour_parts(device).values())

    def hour_parts(self, device: Device) -> dict[str, float]:
        """$ for one hour of one device, by what they are paid for."""
        if self.price is None and device.price is None:
            raise UserError(f"no price is known for {device.name}", "give --price DOLLARS_PER_HOUR or --prices FILE")
        rent = self.price if self.price is not None else device.price.middle  # type: ignore[union-attr]
        rent *= 1 - self.spot_discount
        power = power_dollars_per_hour(device, self.pue, self.dollars_per_kwh) if self.power else 0.0
        overhead = (rent + power) * self.overhead
        lost = self.cold_starts_per_day * self.cold_start_minutes / (24 * 60)
        return {"rent": rent, "power": power, "overhead": overhead, "cold_starts": (rent + power + overhead) * lost}


def utilization_of_day(hourly_load: list[float]) -> float:
    """Mean over peak of a daily curve: what a fixed fleet sized for the peak is used."""
    if not hourly_load or min(hourly_load) < 0 or max(hourly_load) <= 0:
        raise UserError("a daily curve needs loads of at least 0, one of them above", "give one number per hour")
    return sum(hourly_load) / len(hourly_load) / max(hourly_load)


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
    """A plan beside what is paid today for the same tokens. Shares are fractions; negative saves."""

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
