"""Scaling by queue length and KV cache usage, which limit an engine; never by GPU utilisation.

Two ways to the same behaviour: KEDA (asks Prometheus itself) or a plain HorizontalPodAutoscaler (needs the Prometheus
adapter, whose rules are written too). Only one of them may own a Deployment. Up quickly, down after five calm minutes:
a replica that was removed costs a cold start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenmill.deploy.engines.base import Engine, Signals
from tokenmill.deploy.kubernetes import Manifest
from tokenmill.deploy.serving import Serving
from tokenmill.errors import UserError

AUTOSCALERS = ("keda", "hpa", "none")
PROMETHEUS = "http://prometheus-operated.monitoring.svc:9090"
_KV_TARGET = 0.8
_SCALE_DOWN_SECONDS = 300
_SCALE_UP_SECONDS = 30


@dataclass(frozen=True, slots=True)
class ScaleTarget:
    """What has the replicas, and the Service of the same name whose pods are measured."""

    version: str
    kind: str
    name: str

    @property
    def reference(self) -> dict[str, str]:
        return {"apiVersion": self.version, "kind": self.kind, "name": self.name}


def autoscaler(
    kind: str, engine: Engine, serving: Serving, prometheus: str, max_replicas: int, target: ScaleTarget
) -> list[Manifest]:
    if kind not in AUTOSCALERS:
        raise UserError(f"unknown autoscaler '{kind}'", f"one of {', '.join(AUTOSCALERS)}")
    if kind == "none" or engine.signals is None:
        return []
    make = _scaled_object if kind == "keda" else _horizontal
    return make(engine.signals, serving, prometheus, max(max_replicas, serving.replicas), target)


def queue_target(serving: Serving) -> int:
    """Waiting requests per replica at which one more replica is started: a quarter of its concurrency."""
    return max(1, serving.users // 4)


def behavior(serving: Serving) -> dict[str, Any]:
    """Down one replica at a time, up by doubling; the next step up waits until new replicas can have started."""
    return {
        "scaleUp": {
            "stabilizationWindowSeconds": _SCALE_UP_SECONDS,
            "policies": [{"type": "Percent", "value": 100, "periodSeconds": max(60, min(1800, serving.start_seconds))}],
        },
        "scaleDown": {
            "stabilizationWindowSeconds": _SCALE_DOWN_SECONDS,
            "policies": [{"type": "Pods", "value": 1, "periodSeconds": 120}],
        },
    }


def _scaled_object(
    signals: Signals, serving: Serving, prometheus: str, max_replicas: int, target: ScaleTarget
) -> list[Manifest]:
    service = f'{{service="{target.name}"}}'
    triggers = [(f"sum({signals.queue}{service})", str(queue_target(serving)), "AverageValue", "queue")]
    if signals.kv:  # a mean over replicas: compared as it is, not divided by their number
        triggers.append((f"avg({signals.kv}{service})", f"{_KV_TARGET:g}", "Value", "kv"))
    return [
        {
            "apiVersion": "keda.sh/v1alpha1",
            "kind": "ScaledObject",
            "metadata": {"name": serving.name},
            "spec": {
                "scaleTargetRef": target.reference,
                "minReplicaCount": 1,
                "maxReplicaCount": max_replicas,
                "pollingInterval": 15,
                "cooldownPeriod": _SCALE_DOWN_SECONDS,
                "fallback": {"failureThreshold": 4, "replicas": serving.replicas},
                "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior(serving)}},
                "triggers": [
                    {
                        "type": "prometheus",
                        "name": name,
                        "metricType": kind,
                        "metadata": {"serverAddress": prometheus, "query": query, "threshold": threshold},
                    }
                    for query, threshold, kind, name in triggers
                ],
            },
        }
    ]


def _horizontal(
    signals: Signals, serving: Serving, prometheus: str, max_replicas: int, target: ScaleTarget
) -> list[Manifest]:
    """The HPA, and the rules that make the adapter offer its metrics (a ConfigMap in the adapter's own layout)."""
    named = [(signals.queue, "serving_requests_waiting", str(queue_target(serving)))]
    if signals.kv:
        named.append((signals.kv, "serving_kv_usage", f"{round(1000 * _KV_TARGET)}m"))
    metrics = [
        {
            "type": "Pods",
            "pods": {"metric": {"name": name}, "target": {"type": "AverageValue", "averageValue": value}},
        }
        for _, name, value in named
    ]
    scaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": serving.name},
        "spec": {
            "scaleTargetRef": target.reference,
            "minReplicas": 1,
            "maxReplicas": max_replicas,
            "behavior": behavior(serving),
            "metrics": metrics,
        },
    }
    rules = "".join(_rule(metric, name) for metric, name, _ in named)
    adapter = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"{serving.name}-adapter-rules",
            "annotations": {"tokenmill/use": f"rules for prometheus-adapter, which reads {prometheus}"},
        },
        "data": {"config.yaml": "rules:\n" + rules},
    }
    return [scaler, adapter]


def _rule(metric: str, name: str) -> str:
    return (
        f"- seriesQuery: '{metric}'\n"
        '  resources: {overrides: {namespace: {resource: "namespace"}, pod: {resource: "pod"}}}\n'
        f'  name: {{as: "{name}"}}\n'
        "  metricsQuery: 'avg(<<.Series>>{<<.LabelMatchers>>}) by (<<.GroupBy>>)'\n"
    )
