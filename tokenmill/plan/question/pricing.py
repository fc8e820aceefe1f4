"""How hardware is paid for, as the user states it: price, discount, power, people, cold starts, today's bill.

Owns the records, their range checks and the dollars of one device-hour. What a token costs is search/money.py's.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import Device

HOURS_PER_MONTH = 730.0


@dataclass(frozen=True, slots=True)
class Pricing:
    """`price` (of one device) overrides the catalog; for owned devices it is their depreciation, and `power` adds the
    electricity."""

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


@dataclass(frozen=True, slots=True)
class Bill:
    """What is paid today: dollars and tokens a month; 0 tokens: as many as the plan serves at its mean load."""

    dollars: float
    tokens: float = 0.0


def power_dollars_per_hour(device: Device, pue: float, dollars_per_kwh: float) -> float:
    return device.power_w / 1000.0 * pue * dollars_per_kwh


def utilization_of_day(hourly_load: list[float]) -> float:
    """Mean over peak of a daily load curve: the utilization of a fixed fleet that is sized for the peak."""
    if not hourly_load or min(hourly_load) < 0 or max(hourly_load) <= 0:
        raise UserError("a daily curve needs loads of at least 0, one of them above", "give one number per hour")
    return sum(hourly_load) / len(hourly_load) / max(hourly_load)
