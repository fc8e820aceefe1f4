"""The hardware catalog: devices, their limits and dated prices, as data (hardware/data/*.toml).

Owns reading that data, the user's override file, device names and `custom:` descriptions. Knows nothing of models or
performance. Called by the planner, the simulator and the deploy writers.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from tokenmill.errors import UserError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Link:
    """The fastest path between devices: one-direction GB/s, and how many devices it joins."""

    kind: str = "none"
    gb_s: float = 0.0
    devices: int = 1


@dataclass(frozen=True, slots=True)
class PriceRange:
    """Rental price of one device, $ per hour."""

    low: float
    high: float
    date: str
    source: str

    @property
    def middle(self) -> float:
        """The geometric middle: rental prices spread by factors, not by dollars."""
        return (self.low * self.high) ** 0.5


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    vendor: str
    kind: str  # "gpu" | "soc" | "cpu" | "tpu" | "asic" | "phone"
    family: str  # chip generation: decides which measured tables scale to it
    memory_gb: float  # as sold
    usable_gib: float  # what the driver offers to one process
    bandwidth_gb_s: float
    tflops: Mapping[str, float] = field(hash=False)  # dense, by dtype: bf16, fp16, fp8, int8, fp4, fp32
    link: Link = Link()
    pcie_gb_s: float = 0.0
    network_gb_s: float = 0.0
    power_w: float = 0.0
    price: PriceRange | None = None
    aliases: tuple[str, ...] = ()
    source: str = ""
    source_date: str = ""
    confidence: str = "recalled"  # "verified" | "recalled" | "announced" | "stated" (by the user)
    note: str = ""
    measured_shares: tuple[float, float] | None = None  # of bandwidth and arithmetic, reached by our engine right here

    @property
    def usable_bytes(self) -> int:
        return int(self.usable_gib * GIB)

    def supports(self, dtype: str) -> bool:
        """Whether the device multiplies this dtype natively (it may still store weights in it)."""
        return dtype in self.tflops

    def rate(self, dtype: str) -> float:
        """TFLOP/s when operands are held in `dtype`; a dtype it cannot multiply runs at the best 16-bit rate."""
        for name in (dtype, "bf16", "fp16", "fp32"):
            if name in self.tflops:
                return self.tflops[name]
        return max(self.tflops.values())


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """`count` equal devices, as in `h100x4`."""

    device: Device
    count: int = 1


@dataclass(frozen=True, slots=True)
class ApiPrice:
    """What a hosted API asks per million tokens."""

    provider: str
    model: str
    input: float
    cached_input: float
    output: float
    date: str
    source: str


@dataclass(frozen=True, slots=True)
class Catalog:
    devices: Mapping[str, Device]
    apis: tuple[ApiPrice, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)  # every spelling -> device name

    def find_device(self, name: str) -> Device:
        key = _spelling(name)
        if key.startswith("custom:"):
            return parse_custom(name)
        if key in self.names:
            return self.devices[self.names[key]]
        near = difflib.get_close_matches(key, list(self.names), n=4, cutoff=0.4)
        nearest = list(dict.fromkeys(self.names[spelling] for spelling in near))[:3]
        hint = f"nearest: {', '.join(nearest)}; " if nearest else ""
        raise UserError(f"unknown device '{name}'", f"{hint}or describe it: custom:mem=80,bw=3350,bf16=989")

    def parse_gpu(self, text: str) -> DeviceGroup:
        """`h100`, `h100x4`, `4xh100` or `custom:...`, `custom:...x4`."""
        text = text.strip()
        match = re.fullmatch(r"(.+?)\s*[x*×]\s*(\d+)", text) if _spelling(text) not in self.names else None
        prefix = re.fullmatch(r"(\d+)\s*[x*×]\s*(.+)", text) if not match else None
        name, count = (match[1], int(match[2])) if match else (prefix[2], int(prefix[1])) if prefix else (text, 1)
        if count < 1:
            raise UserError(f"a plan needs at least one device, not '{text}'", "write for example h100x1")
        return DeviceGroup(self.find_device(name), count)


def find_device(name: str, prices: Path | None = None) -> Device:
    return load_catalog(prices).find_device(name)


def parse_gpu(text: str, prices: Path | None = None) -> DeviceGroup:
    return load_catalog(prices).parse_gpu(text)


def load_catalog(prices: Path | None = None) -> Catalog:
    """The shipped catalog, with the rows of the user's file laid over it."""
    shipped = _shipped()
    return _overridden(shipped, Path(prices)) if prices else shipped


@cache
def _shipped() -> Catalog:
    folder = resources.files("tokenmill.hardware") / "data"
    devices = tomllib.loads((folder / "devices.toml").read_text(encoding="utf-8"))["device"]
    apis = tomllib.loads((folder / "api_prices.toml").read_text(encoding="utf-8"))["api"]
    rows = [_device(row) for row in devices]
    return _indexed({device.name: device for device in rows}, tuple(ApiPrice(**row) for row in apis))


def _indexed(devices: Mapping[str, Device], apis: tuple[ApiPrice, ...]) -> Catalog:
    names = {_spelling(alias): name for name, device in devices.items() for alias in (name, *device.aliases)}
    return Catalog(devices, apis, names)


def _spelling(name: str) -> str:
    """Names are compared without case, spaces, underscores or the maker's prefix."""
    key = re.sub(r"[\s_]+", "-", name.strip().lower())
    return re.sub(r"^(nvidia|amd|intel|google|apple)-(geforce-|instinct-)?", "", key)


def _device(row: dict[str, Any], base: Device | None = None, prefix: str = "") -> Device:
    known = {item.name for item in fields(Device)}
    for key in row:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            raise UserError(f"{prefix}unknown field '{key}' of device '{row.get('name')}'", hint + "see devices.toml")
    values = dict(row)
    values["aliases"] = tuple(values.get("aliases", base.aliases if base else ()))
    if "link" in values:
        values["link"] = Link(**values["link"])
    if "price" in values:
        values["price"] = _price(values["price"], row.get("name", ""), prefix)
    if base is not None:
        values["tflops"] = {**base.tflops, **values.get("tflops", {})}
        return replace(base, **values)
    missing = [key for key in ("memory_gb", "bandwidth_gb_s", "tflops") if key not in values]
    if missing:
        raise UserError(f"{prefix}device '{row.get('name')}' lacks {', '.join(missing)}", "a new device needs them")
    values.setdefault("usable_gib", values["memory_gb"] * 0.98)  # "80 GB" of HBM is 80 GiB less what the driver keeps
    for key, default in (("vendor", "custom"), ("kind", "gpu"), ("family", "custom")):
        values.setdefault(key, default)
    return Device(**values)


def _price(value: Any, name: str, prefix: str) -> PriceRange:
    row = {"low": value, "high": value} if isinstance(value, int | float) else dict(value)
    row.setdefault("high", row.get("low"))
    if any(not isinstance(row.get(key), int | float) or row[key] < 0 for key in ("low", "high")):
        raise UserError(f"{prefix}price of '{name}' must be dollars per hour, at least 0, not {value}", "correct it")
    if row["high"] < row["low"]:
        raise UserError(f"{prefix}price of '{name}': high {row['high']} is below low {row['low']}", "swap them")
    return PriceRange(row["low"], row["high"], str(row.get("date", "")), str(row.get("source", "stated")))


def _overridden(shipped: Catalog, path: Path) -> Catalog:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", "give a TOML file for --prices") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not TOML: {error}", "copy the layout of hardware/data/devices.toml") from error
    prefix = f"{path}: "
    for key in data:
        if key not in ("device", "api"):
            remedy = 'write [[device]] with name = "h100" and price = 2.5, or [[api]]'
            raise UserError(f"{prefix}unknown table '{key}'", remedy)
    devices = dict(shipped.devices)
    for row in data.get("device", []):
        if "name" not in row:
            raise UserError(f"{prefix}a [[device]] without a name", 'add name = "..."')
        known = shipped.names.get(_spelling(row["name"]))
        device = _device({**row, "name": known or row["name"]}, devices[known] if known else None, prefix)
        devices[device.name] = device
    apis = [_api(row, prefix) for row in data.get("api", [])]
    overridden = {(api.provider, api.model) for api in apis}
    kept = [api for api in shipped.apis if (api.provider, api.model) not in overridden]
    return _indexed(devices, tuple(kept + apis))


def _api(row: dict[str, Any], prefix: str) -> ApiPrice:
    values = {"cached_input": row.get("input"), "date": "", "source": "stated", "provider": "stated", **row}
    for key in ("input", "cached_input", "output"):
        if not isinstance(values.get(key), int | float) or values[key] < 0:
            raise UserError(f"{prefix}api price '{key}' must be dollars per million tokens, at least 0", "correct it")
    try:
        return ApiPrice(**values)
    except TypeError as error:
        raise UserError(f"{prefix}api row: {error}", "fields: provider, model, input, cached_input, output") from error


_CUSTOM_KEYS = {"mem": "memory_gb", "bw": "bandwidth_gb_s", "usable": "usable_gib", "power": "power_w"}
_RATES = ("bf16", "fp16", "fp8", "int8", "fp4", "fp32")


def parse_custom(text: str) -> Device:
    """`custom:mem=80,bw=3350,bf16=989[,fp8=..][,link=450][,price=2.5][,power=700][,usable=79]` (GB, GB/s, TFLOP/s)."""
    valid = [*_CUSTOM_KEYS, *_RATES, "link", "price"]
    values: dict[str, float] = {}
    for part in filter(None, text.split(":", 1)[1].split(",")):
        key, _, number = (piece.strip() for piece in part.partition("="))
        if key not in valid:
            near = difflib.get_close_matches(key, valid, n=1)
            raise UserError(f"unknown key '{key}' in '{text}'", f"valid: {', '.join(near or valid)}")
        try:
            values[key] = float(number)
        except ValueError:
            raise UserError(f"'{part}' in '{text}' is not a number", "write for example mem=80") from None
        if values[key] < 0 or (values[key] == 0 and key in ("mem", "bw")):
            raise UserError(f"'{part}' in '{text}' must be above 0", "mem in GB, bw in GB/s, rates in TFLOP/s")
    rates = {key: values[key] for key in _RATES if key in values}
    if "mem" not in values or "bw" not in values or not rates:
        raise UserError(f"'{text}' needs at least mem, bw and one rate", "write custom:mem=80,bw=3350,bf16=989")
    row: dict[str, Any] = {_CUSTOM_KEYS[key]: values[key] for key in _CUSTOM_KEYS if key in values}
    row |= {"name": text, "tflops": rates, "confidence": "stated", "source": "command line"}
    if "link" in values:
        row["link"] = {"kind": "stated", "gb_s": values["link"], "devices": 8}
    if "price" in values:
        row["price"] = {"low": values["price"], "source": "command line"}
    return _device(row)
