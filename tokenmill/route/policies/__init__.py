"""Routing policies by name, of the router and of the simulator alike. To add one: a file here that implements `Policy`,
and its line in this table."""

from __future__ import annotations

from tokenmill.registry import Registry

POLICIES = Registry(
    "router",
    {
        "round_robin": "tokenmill.route.policies.round_robin:RoundRobin",
        "least_loaded": "tokenmill.route.policies.least_loaded:LeastLoaded",
        "prefix_aware": "tokenmill.route.policies.prefix_aware:PrefixAware",
        "least_wait": "tokenmill.route.policies.least_wait:LeastWait",
    },
)
