"""Catalog -> fleet: every model found and measured against the memory plan before the first is loaded."""

from __future__ import annotations

from typing import Any

from tokenmill.checkpoint.sources import resolve
from tokenmill.errors import UserError
from tokenmill.hardware.memory import GIB
from tokenmill.serve.fleet.catalog import Catalog
from tokenmill.serve.fleet.facts import find_facts
from tokenmill.serve.fleet.fleet import Fleet
from tokenmill.serve.fleet.host import LOADED, Host, Opener
from tokenmill.serve.fleet.plan import MemoryPlan, make_plan
from tokenmill.serve.fleet.routing import Routes


def plan_models(catalog: Catalog) -> tuple[list[Host], MemoryPlan]:
    """Blocks: models are looked for, and downloaded where they must be. Raises UserError, also for a model that does
    not fit even alone. One model without a limit takes what the engine finds right, as it is not planned."""
    first, limit = catalog.models[0], catalog.config.memory_limit
    if len(catalog.models) == 1 and not limit:
        host = Host(first)
        host.path = resolve(first.source).path
        return [host], MemoryPlan()
    found = [(spec, find_facts(spec.source, spec.engine)) for spec in catalog.models]
    devices = {facts.device for _, facts in found}
    if len(devices) > 1:
        raise UserError("models of one server run on different devices", "give all the same --device")
    plan = make_plan(limit, devices.pop())
    hosts = []
    for spec, facts in found:
        if spec.engine.gpu_memory_utilization is not None:
            problem = f"gpu_memory_utilization of '{spec.name}' is given beside a memory plan"
            raise UserError(problem, "use --memory-limit for all models, and `memory` for the KV cache of one")
        hosts.append(Host(spec, facts, plan.need(spec.name, facts, spec.engine, spec.config.text_workers)))
    return hosts, plan


def make_fleet(catalog: Catalog, hosts: list[Host], plan: MemoryPlan, opener: Opener) -> Fleet:
    config = catalog.config
    routes = Routes([spec.names for spec in catalog.models], catalog.splits)
    return Fleet(hosts, routes, plan, opener, config.max_queued_requests, config.load_timeout)


def shown_plan(fleet: Fleet) -> dict[str, Any]:
    """The memory plan for the operator: what each model needs, and which are loaded."""
    shown: dict[str, Any] = {"memory_limit": f"{fleet.plan.limit / GIB:.2f} GiB ({fleet.plan.reason})"}
    for host in fleet.hosts.values():
        need = host.need
        state = "loaded" if host.state == LOADED else "loaded on demand"
        shown[host.name] = f"{need.awake / GIB:.2f} GiB of which KV {need.kv / GIB:.2f} ({state})"
    together = fleet.plan.fits([host.need for host in fleet.hosts.values()])
    shown["together"] = "all fit" if together else "not all fit: the least recently used makes room"
    return shown
