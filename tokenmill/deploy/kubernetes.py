"""Kubernetes objects for one engine: Deployment, Service, volume claim, disruption budget, metrics, probes.

Returns plain mappings in the order in which they are applied. Core kinds are checked against the published schemas in
the tests. Scaling lies in autoscaling.py, split pools in split.py. Knows engines only by their contract.
"""

from __future__ import annotations

from typing import Any

from tokenmill.deploy.engines.base import WEIGHTS_FOLDER, Engine, Launch
from tokenmill.deploy.probes import FILES_FOLDER, SCRIPT_NAME, progress_command, progress_script
from tokenmill.deploy.serving import Serving

Manifest = dict[str, Any]
_GIB = 1 << 30
_RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "google": "google.com/tpu", "intel": "gpu.intel.com/xe"}
_PROBE_PERIOD = 10


def manifests(engine: Engine, serving: Serving, launch: Launch) -> list[Manifest]:
    labels = {"app.kubernetes.io/name": serving.name, "app.kubernetes.io/managed-by": "tokenmill"}
    objects = [weights_claim(serving), *files_map(engine, serving.name, launch)]
    objects.append(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata(serving.name, labels, serving),
            "spec": {
                "replicas": serving.replicas,
                "selector": {"matchLabels": {"app.kubernetes.io/name": serving.name}},
                "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
                "template": pod_template(engine, serving, launch, serving.name, labels),
            },
        }
    )
    objects.append(service(serving.name, engine.port, labels))
    objects.append(disruption_budget(serving.name))
    if engine.signals is not None:
        objects.append(service_monitor(serving.name, engine.signals.path, labels))
    return objects


def metadata(name: str, labels: dict[str, str], serving: Serving) -> Manifest:
    notes = {
        "tokenmill/device": f"{serving.device.name} x{serving.devices}",
        "tokenmill/plan": f"{serving.weights} weights, {serving.kv_bits:g}-bit KV, {serving.users} users per replica",
    }
    return {"name": name, "labels": labels, "annotations": notes}


def weights_claim(serving: Serving) -> Manifest:
    """Room for the original and the quantized weights, shared by all replicas."""
    gib = max(10, int(2.5 * serving.weight_bytes / _GIB) + 1)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": f"{serving.name}-weights"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": f"{gib}Gi"}}},
    }


def files_map(engine: Engine, name: str, launch: Launch) -> list[Manifest]:
    script = progress_script(engine)
    files = dict(launch.files) | ({SCRIPT_NAME: script} if script else {})
    if not files:
        return []
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-files"}, "data": files}]


def pod_template(
    engine: Engine, serving: Serving, launch: Launch, name: str, labels: dict[str, str], image: str = ""
) -> Manifest:
    volumes: list[Manifest] = [
        {"name": "weights", "persistentVolumeClaim": {"claimName": f"{serving.name}-weights"}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{max(2, 2 * serving.devices)}Gi"}},
    ]
    mounts: list[Manifest] = [
        {"name": "weights", "mountPath": WEIGHTS_FOLDER},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    if files_map(engine, name, launch):
        volumes.append({"name": "files", "configMap": {"name": f"{name}-files"}})
        mounts.append({"name": "files", "mountPath": FILES_FOLDER, "readOnly": True})
    container = {
        "name": engine.name,
        "image": image or engine.image_for(serving),
        "command": [launch.command[0]],
        "args": list(launch.command[1:]),
        "env": environment(launch),
        "ports": [{"name": "http", "containerPort": engine.port}],
        "resources": resources(serving),
        "volumeMounts": mounts,
        **probes(engine, serving),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return {
        "metadata": {"labels": labels},
        "spec": {
            "terminationGracePeriodSeconds": 120,  # requests in flight end first
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            "volumes": volumes,
        },
    }


def environment(launch: Launch) -> list[Manifest]:
    variables: list[Manifest] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "HF_HOME", "value": f"{WEIGHTS_FOLDER}/hub"},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub-token", "key": "token", "optional": True}}},
    ]
    return variables + [{"name": name, "value": value} for name, value in launch.environment]


def resources(serving: Serving) -> Manifest:
    """Memory of the host: the weights pass through it; a CPU engine keeps them and the KV cache there."""
    share = 1.6 if serving.device.kind in ("cpu", "soc") else 0.5
    gib = max(4, int(share * serving.weight_bytes / serving.pp / _GIB) + 4)
    if serving.device.kind in ("cpu", "soc"):
        requests = {"cpu": "8", "memory": f"{gib}Gi"}
        return {"requests": requests, "limits": {"memory": f"{gib}Gi"}}
    device = {_RESOURCES.get(serving.device.vendor, "nvidia.com/gpu"): str(serving.devices)}
    return {
        "requests": {"cpu": str(4 * serving.devices), "memory": f"{gib}Gi", **device},
        "limits": {"memory": f"{2 * gib}Gi", **device},
    }


def probes(engine: Engine, serving: Serving) -> Manifest:
    """Started: the cold start is over. Ready: takes requests. Alive: tokens are generated (see probes.py)."""
    health = {"httpGet": {"path": engine.health, "port": "http"}}
    command = progress_command(engine)
    alive = {"exec": {"command": command}} if command else health
    return {
        "startupProbe": {
            **health,
            "periodSeconds": _PROBE_PERIOD,
            "timeoutSeconds": 5,
            "failureThreshold": -(-serving.start_seconds // _PROBE_PERIOD),
        },
        "readinessProbe": {**health, "periodSeconds": _PROBE_PERIOD, "timeoutSeconds": 5, "failureThreshold": 2},
        "livenessProbe": {**alive, "periodSeconds": 30, "timeoutSeconds": 25, "failureThreshold": 3},
    }


def service(name: str, port: int, labels: dict[str, str], headless: bool = False) -> Manifest:
    spec: Manifest = {
        "selector": {"app.kubernetes.io/name": name},
        "ports": [{"name": "http", "port": port, "targetPort": "http"}],
    }
    if headless:  # every pod gets an address of its own; KV is handed over between pods
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "labels": labels}, "spec": spec}


def disruption_budget(name: str) -> Manifest:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app.kubernetes.io/name": name}}},
    }


def service_monitor(name: str, path: str, labels: dict[str, str]) -> Manifest:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "selector": {"matchLabels": {"app.kubernetes.io/name": name}},
            "endpoints": [{"port": "http", "path": path, "interval": "15s"}],
        },
    }
