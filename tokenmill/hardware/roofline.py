"""The roofline: the least time an operation can take on a device, and how a measured time moves to another device.

Pure arithmetic over catalog devices. Knows nothing of models; called by the planner's time models.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.hardware.catalog import Device

SHARPNESS = 3.0  # p-norm that joins the memory and the compute roof


@dataclass(frozen=True, slots=True)
class Work:
    """What an operation moves and computes. `math` is the dtype its operands are multiplied in."""

    nbytes: float
    flops: float
    math: str = "bf16"

    def milliseconds(self, device: Device) -> float:
        """The smooth maximum of moving the bytes and doing the arithmetic, both at full rate."""
        memory = self.nbytes / (device.bandwidth_gb_s * 1e6)
        compute = self.flops / (device.rate(self.math) * 1e9)
        return smooth_max(memory, compute)


def smooth_max(first: float, second: float, sharpness: float = SHARPNESS) -> float:
    low, high = sorted((first, second))
    if high <= 0.0:
        return 0.0
    return high * (1.0 + (low / high) ** sharpness) ** (1.0 / sharpness)


BEST_SHARE = 0.8  # of a roof, that a good kernel reaches


def transferred(ms: float, measured: Work, measured_on: Device, wanted: Work, device: Device, floor: float) -> float:
    """A measured time moved to other work on another device.

    The launch floor stays. What the roofs explain scales with them; what a slow kernel takes beyond that is latency,
    which another memory on the same chip does not mend, so it scales only across chip generations.
    """
    base = measured.milliseconds(measured_on)
    expected = wanted.milliseconds(measured_on)
    if base <= 0.0 or expected <= 0.0:
        return ms
    floor = min(floor, ms)
    moved = (ms - floor) * expected / base  # the wanted work on the measured device
    ratio = wanted.milliseconds(device) / expected
    if device.family != measured_on.family:
        return floor + moved * ratio
    explained = min(moved, expected / BEST_SHARE)
    return floor + explained * ratio + (moved - explained)
