"""Routers by name. To add one: a file here that implements `Router`, and its line in this table."""

from __future__ import annotations

from tokenmill.registry import Registry

ROUTERS = Registry(
    "router",
    {
        "round_robin": "tokenmill.plan.simulate.routing.round_robin:RoundRobin",
        "least_loaded": "tokenmill.plan.simulate.routing.least_loaded:LeastLoaded",
        "prefix_aware": "tokenmill.plan.simulate.routing.prefix_aware:PrefixAware",
    },
)
