"""Kubernetes objects for one engine: Deployment, Service, volume claim, disruption budget, network policy, metrics.

Returns plain mappings in the order in which they are applied. Core kinds are checked against the published schemas in
the tests. Scaling lies in autoscaling.py, split pools in split.py. Knows engines only by their contract.
"""

from __future__ import annotations

from typing import Any

from tokenmill.deploy.engines.base import METRICS_KEY, WEIGHTS_FOLDER, Engine, Launch
from tokenmill.deploy.hardening import (
    CACHE_FOLDER,
    GRACE_SECONDS,
    KEYS_FILE,
    KEYS_FOLDER,
    PRE_STOP_SECONDS,
    SECRET_KEY,
    USER_ID,
    key_arguments,
)
from tokenmill.deploy.hardening import environment as hardened_environment
from tokenmill.deploy.probes import FILES_FOLDER, SCRIPT_NAME, progress_command, progress_script
from tokenmill.deploy.serving import Serving

Manifest = dict[str, Any]
_GIB = 1 << 30
_RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "google": "google.com/tpu", "intel": "gpu.intel.com/xe"}
_PROBE_PERIOD = 10
_PRIVATE_NETWORKS = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16")  # the last: cloud metadata


def manifests(engine: Engine, serving: Serving, launch: Launch) -> list[Manifest]:
    labels = object_labels(serving.name, serving)
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
    objects.append(network_policy(engine, serving))
    if engine.signals is not None:
        objects.append(service_monitor(engine, serving, serving.name, labels))
    return objects


def object_labels(name: str, serving: Serving) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": name,
        "app.kubernetes.io/part-of": serving.name,
        "app.kubernetes.io/managed-by": "tokenmill",
    }


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
    volumes, mounts = _volumes(engine, serving, launch, name)
    arguments = [*launch.command[1:]]
    if not image:  # a router has no keys of its own: it passes on what clients send
        arguments += key_arguments(engine, f"{KEYS_FOLDER}/{KEYS_FILE}", f"$({engine.key_variable})")
    container = {
        "name": engine.name,
        "image": image or engine.image_for(serving),
        "command": [launch.command[0]],
        "args": arguments,
        "env": environment(engine, serving, launch),
        "ports": [{"name": "http", "containerPort": engine.port}],
        "resources": resources(serving),
        "volumeMounts": mounts,
        **probes(engine, serving),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    return {
        "metadata": {"labels": labels},
        "spec": {
            "terminationGracePeriodSeconds": GRACE_SECONDS,  # requests in flight end first
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER_ID,
                "runAsGroup": USER_ID,
                "fsGroup": USER_ID,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **node_choice(serving),
            "containers": [container],
            "volumes": volumes,
        },
    }


def node_choice(serving: Serving) -> Manifest:
    """Nodes with accelerators are usually tainted with the name of the resource that their device plugin offers."""
    if not serving.on_gpu:
        return {}
    return {"tolerations": [{"key": device_resource(serving), "operator": "Exists", "effect": "NoSchedule"}]}


def device_resource(serving: Serving) -> str:
    """What the vendor's device plugin calls one device."""
    return _RESOURCES.get(serving.device.vendor, "nvidia.com/gpu")


def _volumes(engine: Engine, serving: Serving, launch: Launch, name: str) -> tuple[list[Manifest], list[Manifest]]:
    """The root file system is read-only: what is written has a volume of its own, with a limit."""
    volumes: list[Manifest] = [
        {"name": "weights", "persistentVolumeClaim": {"claimName": f"{serving.name}-weights"}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{max(2, 2 * serving.devices)}Gi"}},
        {"name": "cache", "emptyDir": {"sizeLimit": "10Gi"}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "2Gi"}},
    ]
    mounts: list[Manifest] = [
        {"name": "weights", "mountPath": WEIGHTS_FOLDER},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        {"name": "cache", "mountPath": CACHE_FOLDER},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if files_map(engine, name, launch):
        volumes.append({"name": "files", "configMap": {"name": f"{name}-files"}})
        mounts.append({"name": "files", "mountPath": FILES_FOLDER, "readOnly": True})
    if engine.keys_file_flag:  # without the secret the pod does not start
        items = [{"key": KEYS_FILE, "path": KEYS_FILE}]
        secret = {"secretName": secret_name(serving), "items": items, "defaultMode": 0o440}
        volumes.append({"name": "keys", "secret": secret})
        mounts.append({"name": "keys", "mountPath": KEYS_FOLDER, "readOnly": True})
    return volumes, mounts


def secret_name(serving: Serving) -> str:
    return f"{serving.name}-api-keys"


def environment(engine: Engine, serving: Serving, launch: Launch) -> list[Manifest]:
    variables: list[Manifest] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub-token", "key": "token", "optional": True}}},
    ]
    if engine.key_variable and not engine.keys_file_flag:
        reference = {"secretKeyRef": {"name": secret_name(serving), "key": SECRET_KEY}}
        variables.append({"name": engine.key_variable, "valueFrom": reference})
    for variable, key in launch.secrets:
        reference = {"secretKeyRef": {"name": secret_name(serving), "key": key}}
        variables.append({"name": variable, "valueFrom": reference})
    plain = [*hardened_environment(engine), *launch.environment]
    return variables + [{"name": name, "value": value} for name, value in plain]


def resources(serving: Serving) -> Manifest:
    """Of the host, from the plan: weights pass through its memory; a CPU engine keeps them and the KV cache there."""
    if serving.device.kind in ("cpu", "soc"):
        planned = int(serving.memory_share * serving.device.usable_bytes / _GIB)
        gib = max(
            4, int(1.2 * serving.weight_bytes / _GIB) + 2, min(planned, int(1.6 * serving.weight_bytes / _GIB) + 4)
        )
        amounts = {"cpu": str(8 * serving.devices), "memory": f"{gib}Gi", "ephemeral-storage": "1Gi"}
        return {"requests": amounts, "limits": {"memory": f"{gib}Gi", "ephemeral-storage": "14Gi"}}
    gib = max(4, int(0.5 * serving.weight_bytes / serving.pp / _GIB) + 4)
    device = {device_resource(serving): str(serving.devices)}
    return {
        "requests": {
            "cpu": str(4 * serving.devices),
            "memory": f"{gib}Gi",
            "ephemeral-storage": "1Gi",
            **device,
        },
        "limits": {"memory": f"{2 * gib}Gi", "ephemeral-storage": "14Gi", **device},
    }


def probes(engine: Engine, serving: Serving) -> Manifest:
    """Started: the cold start is over. Ready: takes requests. Alive: a restart would not help (see probes.py).

    An engine with a liveness endpoint of its own reloads its model without becoming dead: only then may loading take
    longer than a liveness probe is patient.
    """
    ready = {"httpGet": {"path": engine.ready or engine.health, "port": "http"}}
    command = progress_command(engine)
    if engine.live:
        alive: Manifest = {"httpGet": {"path": engine.live, "port": "http"}}
    else:
        alive = {"exec": {"command": command}} if command else {"httpGet": {"path": engine.health, "port": "http"}}
    return {
        "startupProbe": {
            **ready,
            "periodSeconds": _PROBE_PERIOD,
            "timeoutSeconds": 5,
            "failureThreshold": -(-serving.start_seconds // _PROBE_PERIOD),
        },
        "readinessProbe": {**ready, "periodSeconds": _PROBE_PERIOD, "timeoutSeconds": 5, "failureThreshold": 2},
        "livenessProbe": {**alive, "periodSeconds": 30, "timeoutSeconds": 25, "failureThreshold": 3},
    }


def network_policy(engine: Engine, serving: Serving, split: bool = False) -> Manifest:
    """In: pods of this namespace and the monitoring one, on the port alone. Out: names, and the hub where the model
    comes from there. Pods of a split deployment talk to each other freely: KV goes over ports of its own."""
    selector = {"matchLabels": {"app.kubernetes.io/part-of": serving.name}}
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    port = [{"protocol": "TCP", "port": engine.port}]
    ingress: list[Manifest] = [{"from": [{"podSelector": {}}, monitoring], "ports": port}]
    names = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}
    ports = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    egress: list[Manifest] = [{"to": [names], "ports": ports}]
    if not serving.model.startswith("/"):
        public = {"ipBlock": {"cidr": "0.0.0.0/0", "except": list(_PRIVATE_NETWORKS)}}
        egress.append({"to": [public], "ports": [{"protocol": "TCP", "port": 443}]})
    if split:
        ingress.append({"from": [{"podSelector": selector}]})
        egress.append({"to": [{"podSelector": selector}]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": serving.name, "labels": object_labels(serving.name, serving)},
        "spec": {
            "podSelector": selector,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": egress,
        },
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


def service_monitor(engine: Engine, serving: Serving, name: str, labels: dict[str, str]) -> Manifest:
    """Prometheus reads the metrics with a key of its own, from the same secret."""
    assert engine.signals is not None
    endpoint: Manifest = {"port": "http", "path": engine.signals.path, "interval": "15s"}
    if engine.metrics_need_key:
        key = METRICS_KEY if engine.keys_file_flag else SECRET_KEY
        endpoint["authorization"] = {"type": "Bearer", "credentials": {"name": secret_name(serving), "key": key}}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": {"name": name, "labels": labels},
        "spec": {"selector": {"matchLabels": {"app.kubernetes.io/name": name}}, "endpoints": [endpoint]},
    }
