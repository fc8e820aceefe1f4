"""Queue disciplines by name. To add one: a file here that implements `Discipline`, and its line in this table."""

from __future__ import annotations

from tokenmill.registry import Registry

DISCIPLINES = Registry(
    "queue discipline",
    {
        "fcfs": "tokenmill.engine.order.fcfs:FirstComeFirstServed",
        "fair": "tokenmill.engine.order.fair:WeightedFair",
        "priority": "tokenmill.engine.order.priority:PriorityFirst",
    },
)
