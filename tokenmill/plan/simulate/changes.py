"""What `simulate --traffic-log DIR --with NAME=VALUE` changes about the logged server.

Names are those of the engine's options (checked as `serve` checks them), `replicas` and `router`. Each change becomes a
change of the simulated engine: its shape, its pages, its step cost. What no simulation can know is refused, what is
assumed is said. Called by the twin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.config import EngineConfig, parse_size
from tokenmill.errors import UserError, unknown_name
from tokenmill.hardware.catalog import load_catalog
from tokenmill.hardware.weight_formats import find_format
from tokenmill.plan.cost.measured_cost import FEATURES, MeasuredCost
from tokenmill.plan.cost.step_cost import StepCost
from tokenmill.plan.question.deployment import Deployment
from tokenmill.plan.question.model_names import describe_for_planning
from tokenmill.plan.simulate.engine_shape import EngineShape
from tokenmill.plan.simulate.logged_server import LoggedServer
from tokenmill.plan.simulate.runner import CostModel
from tokenmill.route.policies import POLICIES

_SHARES = {"half": 0.5, "quarter": 0.25, "double": 2.0}
_FLEET = ("replicas", "router")
_SHAPE = {
    "context": "context",
    "concurrency": "max_running",
    "batch_tokens": "batch_tokens",
    "scheduling": "scheduling",
    "kv_policy": "kv_policy",
    "itl": "itl",
}
# Bytes of one KV value; scales of groups are left out.
_KV_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0,
             "int8": 1.0, "int4": 0.5}  # fmt: skip
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class Changed:
    """The logged server as it would have been. `assumptions`: what the answer counts on without a measurement."""

    shape: EngineShape
    cost: CostModel
    prefix_caching: bool
    replicas: int = 1
    router: str = "prefix_aware"
    words: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()


def as_logged(server: LoggedServer, cost: CostModel) -> Changed:
    return Changed(server.shape(), cost, bool(server.config.get("prefix_caching", True)))


def changed(server: LoggedServer, cost: MeasuredCost, words: Sequence[str]) -> Changed:
    """Apply changes such as `kv-cache-dtype=fp8`, `replicas=2` or `memory=half`, in the order given."""
    result = replace(as_logged(server, cost), words=tuple(words))
    for word in words:
        name, sign, value = word.partition("=")
        name = name.strip().replace("-", "_")
        if not sign or not value:
            raise UserError(f"'{word}' is not a change", "write --with NAME=VALUE, such as --with replicas=2")
        result = _apply(result, server, name, value.strip())
    return result


def _apply(so_far: Changed, server: LoggedServer, name: str, value: str) -> Changed:
    if name == "replicas":
        if not value.isdecimal() or int(value) < 1:
            raise UserError(f"replicas is '{value}'", "give 1 or more")
        return replace(so_far, replicas=int(value))
    if name == "router":
        if value not in POLICIES:
            raise unknown_name("router", value, POLICIES.names())
        return replace(so_far, router=value)
    if name == "memory":
        return _with_memory(so_far, server, value)
    if name == "kv_cache_dtype":
        value = _ALIASES.get(value, value)
    wanted = EngineConfig.from_options({name: value}, environment={})  # refuses what `serve` would refuse
    ((option, meant),) = ((key, getattr(wanted, key)) for key in wanted.sources)
    return _with_option(so_far, server, option, meant)


def _with_option(so_far: Changed, server: LoggedServer, option: str, value: Any) -> Changed:
    shape = so_far.shape
    if option in _SHAPE:
        return replace(so_far, shape=replace(shape, **{_SHAPE[option]: value}))
    if option == "prefix_caching":
        return replace(so_far, prefix_caching=bool(value))
    if option == "page_size":
        pages = shape.num_pages * shape.layout.page_size // value
        return replace(so_far, shape=replace(shape, num_pages=pages, layout=replace(shape.layout, page_size=value)))
    if option == "kv_cache_dtype":
        return _with_kv_dtype(so_far, server, value)
    if option == "quantization":
        return _with_weights(so_far, server, value)
    known = [*_FLEET, "memory", *_SHAPE, "prefix_caching", "page_size", "kv_cache_dtype", "quantization"]
    raise UserError(
        f"what {option} would have changed is not known without running it",
        f"measure it with tokenmill optimize; simulated are {', '.join(known)}",
    )


def _with_memory(so_far: Changed, server: LoggedServer, value: str) -> Changed:
    """KV memory: a share of what there was (half, 0.5x), or a size."""
    share = _SHARES.get(value)
    if share is None and value.endswith("x"):
        try:
            share = float(value[:-1])
        except ValueError:
            share = None
    if share is None:
        bytes_before = server.config.get("memory")
        if not bytes_before:
            raise UserError("the log does not say how large the KV cache was", "write --with memory=half or 0.5x")
        share = parse_size(value) / int(bytes_before)
    if not share > 0:
        raise UserError(f"memory is '{value}'", "give half, 0.5x or a size such as 2GiB")
    return _more_pages(so_far, share)


def _more_pages(so_far: Changed, share: float) -> Changed:
    pages = int(so_far.shape.num_pages * share)
    longest = so_far.shape.layout.peak_pages(so_far.shape.context)
    if pages < longest:
        raise UserError(
            f"{pages} KV pages do not hold one request of {so_far.shape.context} tokens ({longest} pages)",
            "give more memory, or add --with context=N before it",
        )
    return replace(so_far, shape=replace(so_far.shape, num_pages=pages))


def _with_kv_dtype(so_far: Changed, server: LoggedServer, dtype: str) -> Changed:
    """More tokens fit into the same bytes, and attention reads fewer of them."""
    before = str(server.config.get("kv_cache_dtype"))
    for name in (before, dtype):
        if name not in _KV_BYTES:
            raise UserError(f"how many bytes a KV cache of {name} takes is not known here", _one_of(_KV_BYTES))
    share = _KV_BYTES[dtype] / _KV_BYTES[before]
    note = f"attention over a {dtype} cache reads {share:g} times the bytes of {before} and takes as much of its time"
    scaled = _scaled(so_far.cost, {"decode context": share, "prompt context": 1.0})
    roomier = _more_pages(so_far, 1.0 / share)
    return replace(roomier, cost=scaled, assumptions=(*so_far.assumptions, note))


def _scaled(cost: CostModel, factors: Mapping[str, float]) -> CostModel:
    if isinstance(cost, _Ratio):
        return replace(cost, measured=_scaled(cost.measured, factors))
    assert isinstance(cost, MeasuredCost)
    pairs = zip(FEATURES, cost.coefficients, strict=True)
    return replace(cost, coefficients=tuple(factors.get(name, 1.0) * value for name, value in pairs))


@dataclass(frozen=True, slots=True)
class _Ratio:
    """A measured step, times what the planner's model says the change does to it."""

    measured: CostModel
    before: StepCost
    after: StepCost

    def step_ms(self, prefill: Sequence[tuple[int, int]], decode: tuple[int, float]) -> float:
        ms = self.measured.step_ms(prefill, decode)
        return ms * self.after.step_ms(prefill, decode) / self.before.step_ms(prefill, decode) if ms else 0.0


def _with_weights(so_far: Changed, server: LoggedServer, quantization: str) -> Changed:
    """Weights of fewer bits, on a device of the catalog: the planner's model says how much shorter each step is."""
    try:
        device = load_catalog().find_device(server.device)
        model = describe_for_planning(server.model)
    except UserError as error:
        raise UserError(
            f"what other weights would have changed is not known: {error.problem}", "measure it with tokenmill optimize"
        ) from None
    make: Callable[[str], StepCost] = lambda weights: StepCost(  # noqa: E731
        Deployment(model, device, find_format(weights), engine="tokenmill")
    )
    note = f"steps with {quantization} weights are shorter by what the planner predicts for a {device.name}"
    ratio = _Ratio(so_far.cost, make(model.stored_format), make(quantization))
    return replace(so_far, cost=ratio, assumptions=(*so_far.assumptions, note))


def _one_of(names: Mapping[str, float]) -> str:
    return f"give one of {', '.join(names)}"
