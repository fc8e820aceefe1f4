"""Time to exchange data between devices: all-reduce, all-to-all, pipeline hand-over (formulas F7, F8, F9).

Closed forms with measured constants (one DGX H200: custom all-reduce of vLLM and NCCL). Called by step_cost.py.
"""

from __future__ import annotations

from bisect import bisect_right
from math import log2

from tokenmill.hardware.catalog import Device

# Microseconds that a small all-reduce takes, by devices: peer-to-peer kernel inside a CUDA graph, and NCCL.
_CUSTOM_US = {2: 4.6, 4: 4.8, 8: 5.1}
_NCCL_US = {2: 6.0, 4: 10.0, 8: 16.0}
# Share of the link that an all-reduce reaches, by message bytes.
_SHARES = ((1 << 20, 0.30), (4 << 20, 0.40), (16 << 20, 0.405), (128 << 20, 0.72))
_CUSTOM_LIMIT = 8 << 20  # larger messages go through NCCL
_POINT_TO_POINT_US = 10.0
# Processes of one CPU host in shared memory (benchmarks/ranks.py, two processes on 2 Neoverse-N1 cores, the line that
# fits the medians of a busy machine; gloo there: 783 us and 0.43 GB/s): start of an exchange, taken once for each
# doubling of the ranks, and what one receives.
_HOST_US = 129.0
_HOST_GB_S = 2.16


def link_share(nbytes: float) -> float:
    sizes = [size for size, _ in _SHARES]
    if nbytes <= sizes[0]:
        return _SHARES[0][1]
    if nbytes >= sizes[-1]:
        return _SHARES[-1][1]
    i = bisect_right(sizes, nbytes) - 1
    (low, low_share), (high, high_share) = _SHARES[i], _SHARES[i + 1]
    return low_share + (high_share - low_share) * (log2(nbytes) - log2(low)) / (log2(high) - log2(low))


def _start_us(devices: int, custom: bool) -> float:
    table = _CUSTOM_US if custom else _NCCL_US
    for size in sorted(table):
        if devices <= size:
            return table[size]
    return table[max(table)] * (1 + log2(devices / max(table)))


def group_gb_s(device: Device, devices: int) -> float:
    """Bandwidth of the slowest hop that a group of this many devices crosses."""
    if devices <= device.link.devices and device.link.gb_s:
        return device.link.gb_s
    return device.network_gb_s or device.pcie_gb_s or 1.0


def host_exchange_ms(nbytes: float, ranks: int) -> float:
    """A gather of `nbytes` in all between ranks that are processes of one host, each on cores of its own."""
    if ranks <= 1:
        return 0.0
    return _HOST_US / 1e3 * log2(ranks) + (ranks - 1) / ranks * nbytes / (_HOST_GB_S * 1e6)


def all_reduce_ms(nbytes: float, devices: int, device: Device, nccl: bool = False) -> float:
    """F8: t = a + 2 (n-1)/n S / (share x link)."""
    if devices <= 1:
        return 0.0
    if device.kind == "cpu":  # our ranks: all bring their partial results and add them up
        return host_exchange_ms(devices * nbytes, devices)
    peer_to_peer = device.link.kind.startswith("nvlink") and devices <= device.link.devices
    custom = peer_to_peer and not nccl and nbytes <= _CUSTOM_LIMIT
    moved = 2 * (devices - 1) / devices * nbytes
    return _start_us(devices, custom) / 1e3 + moved / (link_share(nbytes) * group_gb_s(device, devices) * 1e6)


def all_to_all_ms(tokens: float, per_token: int, hidden: int, value_bytes: float, ep: int, device: Device) -> float:
    """F7: dispatch and combine of `tokens` per rank to their experts."""
    if ep <= 1:
        return 0.0
    moved = 2 * tokens * per_token * hidden * value_bytes * (1 - 1 / ep)
    return 2 * _start_us(ep, True) / 1e3 + moved / (group_gb_s(device, ep) * 1e6)


def hand_over_ms(tokens: float, hidden: int, device: Device, value_bytes: float = 2.0) -> float:
    """F9: activations from one pipeline stage to the next."""
    gb_s = device.network_gb_s or device.pcie_gb_s or 1.0
    return tokens * hidden * value_bytes / (gb_s * 1e6) + _POINT_TO_POINT_US / 1e3
