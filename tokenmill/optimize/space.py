"""The search space on a device: weights, KV dtypes, batch sizes, prefix caching, tiers and drafters.

Everything comes from the registries and their capability flags: what is registered is tried without a change here.
What the device or the model cannot run is left out; what is tried first follows from bits. Measures nothing. Called
by the job; the loop walks it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.hardware.kv_layout import LayerKV, build_layout
from tokenmill.model.kvstore import KV_STORES
from tokenmill.optimize.candidates import STORED, registered_methods, registered_mixes, unquantized_mixes
from tokenmill.quantize.schemes import METHODS
from tokenmill.resolution import DEVICE_DEFAULTS
from tokenmill.runtime.speculation import DRAFTERS

_LAYOUT_TOKENS = 256  # page size at which bits are counted: a multiple of what every store asks for
_SAFE_BITS = 8  # KV dtypes of at least so many bits rarely harm a model
_PROMPT_SHARE = 0.5  # of the stated rate that long steps reach
_GAP_SHARE = 0.6  # of the gap that an ordinary step may take: some wait for two
_MIN_STEP = 128
_BATCH_FACTOR = 4
_PREFIX_TOKENS = 16  # prompts that share a page of prefix


@dataclass(frozen=True, slots=True)
class KVChoice:
    name: str
    bits: float = 32.0  # per value, scales included
    is_float: bool = False
    has_kernel: bool = True  # on this device; else torch expands the pages


@dataclass(frozen=True, slots=True)
class DrafterChoice:
    """`--speculate name:argument`; the argument of one that needs training is the folder it is trained into."""

    name: str
    argument: str = ""
    needs_training: bool = False

    @property
    def speculate(self) -> str:
        return f"{self.name}:{self.argument}" if self.argument else self.name


@dataclass(frozen=True, slots=True)
class Space:
    """`kv[0]` and `batch_tokens[0]` are what weights are compared with first: the defaults, or a step that fits
    into the objective."""

    device: str
    weights: list[str]
    float_weights: list[str]
    kv: list[KVChoice]
    batch_tokens: list[int]
    drafters: list[DrafterChoice] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)  # further settings of the engine, one candidate each
    calibrated: frozenset[str] = frozenset()  # weights that are made with calibration data
    by_blocks: frozenset[str] = frozenset()  # weights that are made block by block, which takes longer
    rounded_at_load: dict[str, str] = field(default_factory=dict)  # --quantization -> the method that rounds alike
    stored: str = ""  # the name of the checkpoint as it is, where that is quantized and tried in any case

    @property
    def default_kv(self) -> str:
        return self.kv[0].name

    @property
    def float_kv(self) -> list[str]:
        return [choice.name for choice in self.kv if choice.is_float]


def weight_names(device: str, source_quantized: bool) -> list[str]:
    """Every quantized choice for a device: GGUF types are the CPU's, methods with their schemes are for both."""
    names = [STORED] if source_quantized else []
    return names + ([*registered_mixes(), *registered_methods()] if device == "cpu" else registered_methods())


def made_up_names(at_load: Mapping[str, str]) -> list[str]:
    """For made-up weights, which no file is made of: what the engine rounds to at load is tried; where it rounds to
    nothing, the weights themselves, so that settings are."""
    return [] if at_load else [STORED]


def rounded_at_load(device: str) -> dict[str, str]:
    """What the engine can round float weights to while it loads them, which takes no time to make."""
    if device != "cuda":
        return {}
    choices = EngineConfig.__dataclass_fields__["quantization"].metadata["choices"]
    return {name: name if name in METHODS else f"rtn-{name.lstrip('int')}" for name in choices}


def float_weight_names(device: str, source_quantized: bool) -> list[str]:
    """Unquantized weights that may be the baseline. A GPU multiplies 16-bit floats only, and reads them as stored."""
    if device == "cpu":
        return unquantized_mixes()
    return ["BF16", "F16"] if source_quantized else [STORED]


def kv_choices(device: str, layers: Sequence[LayerKV], requested: Sequence[str] = ()) -> list[KVChoice]:
    """Registered KV dtypes that this model allows, the device's default first, then in the order to try them.

    Names of the same store are one choice. A store that cannot be imported stays: it is recorded as failed when tried.
    """
    default = DEVICE_DEFAULTS[device].kv_cache_dtype
    seen: set[Any] = set()
    found = []
    for name in requested or [default, *(each for each in KV_STORES if each != default)]:
        choice, identity = _kv_choice(name, device, layers)
        if choice is None or identity in seen:
            continue
        seen.add(identity)
        found.append(choice)
    if not found:
        return [KVChoice(default, is_float=True)]
    first = next((each for each in found if each.name == default), None)
    first = first or min(found, key=lambda each: (not each.is_float, -each.bits, each.name))
    return [first, *sorted((each for each in found if each is not first), key=_kv_order)]


def _kv_choice(name: str, device: str, layers: Sequence[LayerKV]) -> tuple[KVChoice | None, Any]:
    try:
        store = KV_STORES.get(name)
        layout = build_layout(list(layers), math.lcm(_LAYOUT_TOKENS, store.page_multiple))
        if store.declines(layout):
            return None, None
        values = layout.page_size * max(1, sum(each.values_per_token for each in layers))
        bits = 8 * store.page_bytes(layout) * len(layout.groups) / values
        return KVChoice(name, bits, not store.is_coded and bits >= 16, device == "cpu" or store.on_gpu), store
    except Exception:
        return KVChoice(name, 0.0, has_kernel=False), name


def _kv_order(choice: KVChoice) -> tuple[bool, bool, float, str]:
    """With a kernel first; of the safe ones those that save most, then the risky ones, the safest first."""
    risky = choice.bits < _SAFE_BITS
    return (not choice.has_kernel, risky, -choice.bits if risky else choice.bits, choice.name)


def batch_choices(device: str, prompt_tokens: int, latency_matters: bool, fitting: int = 0) -> list[int]:
    """The default, larger where `prompt_tokens` arrive together, smaller where prompts delay others' tokens. `fitting`:
    tokens of a step that keeps the gaps between tokens short enough; where it is less than the default, it comes first
    and nothing larger is tried."""
    default = DEVICE_DEFAULTS[device].batch_tokens
    if 0 < fitting < default:
        return [fitting, *([default] if fitting * _BATCH_FACTOR >= default else [fitting * _BATCH_FACTOR, default])]
    sizes = [default]
    if prompt_tokens > default:
        sizes.append(default * _BATCH_FACTOR)
    if latency_matters and prompt_tokens > default // _BATCH_FACTOR:
        sizes.append(default // _BATCH_FACTOR)
    return sizes


def fitting_tokens(gap_s: float, active_parameters: int, tflops: float) -> int:
    """Tokens of a step that ends well within `gap_s`: a power of two. `tflops`: of the device, as its maker states."""
    rate = _PROMPT_SHARE * tflops * 1e12 / (2 * active_parameters)
    return max(_MIN_STEP, 2 ** round(math.log2(max(1.0, _GAP_SHARE * gap_s * rate))))


def drafter_choices(device: str, num_layers: int) -> list[DrafterChoice]:
    """Every drafter that states what to try; those that need training come last."""
    found = []
    for name in DRAFTERS:
        try:
            drafter = DRAFTERS.get(name)
        except Exception:  # recorded as failed when it is tried
            found.append(DrafterChoice(name))
            continue
        if drafter.needs_training:
            found.append(DrafterChoice(name, needs_training=True))
        else:
            found += [DrafterChoice(name, argument) for argument in drafter.search_arguments(device, num_layers)]
    return sorted(found, key=lambda each: each.needs_training)


def shares_prefixes(prompts: Sequence[Sequence[int]]) -> bool:
    """Whether different prompts begin alike."""
    distinct = {tuple(prompt) for prompt in prompts}
    starts = Counter(prompt[:_PREFIX_TOKENS] for prompt in distinct if len(prompt) > _PREFIX_TOKENS)
    return any(count > 1 for count in starts.values())


def engine_options(
    device: str, prefix_caching: bool, prefixes_shared: bool, working_set: int, kv_memory: int, tier_folder: str
) -> list[dict[str, Any]]:
    """Prefix caching the other way where prompts share prefixes; a tier below where those do not fit. Bytes."""
    options: list[dict[str, Any]] = []
    if prefixes_shared:
        options.append({"prefix_caching": not prefix_caching})
        if working_set > kv_memory:
            tier = {"kv_host_memory": 2 * working_set} if device == "cuda" else {"kv_disk": tier_folder}
            options.append(tier)
    return options
