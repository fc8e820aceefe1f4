"""The catalog's row for the device that a model runs on here, and what an hour of it costs.

Devices are found by the names that drivers and kernels report. Called by `optimize` and by a server that bills.
"""

from __future__ import annotations

import re

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import Catalog, Device
from tokenmill.hardware.machine import Machine

_BY_ARCHITECTURE = {"aarch64": "neoverse-n1", "arm64": "neoverse-n1", "x86_64": "xeon-8480", "AMD64": "xeon-8480"}


def this_device(catalog: Catalog, machine: Machine, kind: str) -> Device | None:
    """The catalog's row for the `kind` ("cpu" or "cuda") that the model runs on; None: a GPU that has none."""
    if kind == "cuda":
        return find_gpu(catalog, machine.gpus[0]) if machine.gpus else None
    try:
        return catalog.find_device(machine.cpu)
    except UserError:
        return catalog.find_device(_BY_ARCHITECTURE.get(machine.architecture, "xeon-8480"))


def find_gpu(catalog: Catalog, reported: str) -> Device | None:
    """The row of a GPU by the name its driver reports ("NVIDIA A100-SXM4-80GB, 81920 MiB"): the spelling with the most
    words of it, then the nearest memory."""
    name, _, memory = reported.partition(",")
    words = _words(name)
    gigabytes = float(re.sub(r"[^\d.]", "", memory) or 0) * 2**20 / 1e9
    found: list[tuple[int, float, str]] = []
    for spelling, device in catalog.names.items():
        row = catalog.devices[device]
        if row.kind in ("gpu", "soc") and _words(spelling) <= words:
            found.append((-len(_words(spelling)), abs(row.memory_gb - gigabytes), device))
    return catalog.devices[min(found)[2]] if found else None


def hour_price(catalog: Catalog, machine: Machine, kind: str) -> tuple[float | None, str]:
    """($ per hour, its source), or (None, the name of a device without a price). A GPU is rented whole; CPU servers are
    rented in slices: the share of the price is the share of the memory."""
    device = this_device(catalog, machine, kind)
    if device is None or device.price is None:
        return None, machine.gpus[0].partition(",")[0] if kind == "cuda" and machine.gpus else machine.cpu
    share = 1.0 if kind == "cuda" else min(1.0, machine.memory_bytes / (device.memory_gb * 1e9))
    part = f"one {device.name}" if kind == "cuda" else f"{share:.0%} of a {device.name} by memory"
    return device.price.middle * share, f"{part} ({device.price.source}, {device.price.date})"


def _words(name: str) -> set[str]:
    """{"a100", "sxm", "80"} of "A100-SXM4-80GB"."""
    words = re.split(r"[\s_-]+", name.lower())
    return {re.sub(r"^(sxm)\d$|^(\d+)gb$", r"\1\2", word) for word in words if word}
