"""Prefill and decode in separate pools on Kubernetes: two StatefulSets with addresses per pod, and the engine's router.

A prompt is computed in one pool and its KV handed to the other, so that long prompts never stall running answers. Only
for engines that can hand KV over. Called by render.py.
"""

from __future__ import annotations

from dataclasses import replace

from tokenmill.deploy.engines.base import Engine
from tokenmill.deploy.kubernetes import (
    Manifest,
    disruption_budget,
    files_map,
    metadata,
    network_policy,
    object_labels,
    pod_template,
    service,
    service_monitor,
    weights_claim,
)
from tokenmill.deploy.serving import Serving
from tokenmill.errors import UserError


def parse_split(text: str) -> tuple[int, int]:
    """ "2:4" -> two prefill and four decode replicas."""
    prefill, _, decode = text.partition(":")
    if not (prefill.isdigit() and decode.isdigit() and int(prefill) > 0 and int(decode) > 0):
        raise UserError(f"'{text}' is not a split", "write PREFILL:DECODE replicas, such as 1:2")
    return int(prefill), int(decode)


def split_manifests(engine: Engine, serving: Serving, split: tuple[int, int]) -> list[Manifest]:
    hosts = {}
    objects = [weights_claim(serving)]
    for role, count in zip(("prefill", "decode"), split, strict=True):
        name = f"{serving.name}-{role}"
        hosts[role] = [f"{name}-{number}.{name}" for number in range(count)]
        objects += _pool(engine, serving, role, count)
    objects += _router(engine, serving, hosts["prefill"], hosts["decode"])
    return [*objects, network_policy(engine, serving, split=True)]


def _pool(engine: Engine, serving: Serving, role: str, count: int) -> list[Manifest]:
    name, launch = f"{serving.name}-{role}", engine.launch(serving, role)
    labels = object_labels(name, serving)
    objects = files_map(engine, name, launch)
    objects.append(service(name, engine.port, labels, headless=True))
    objects.append(
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": metadata(name, labels, serving),
            "spec": {
                "serviceName": name,
                "replicas": count,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": {"app.kubernetes.io/name": name}},
                "template": pod_template(engine, serving, launch, name, labels),
            },
        }
    )
    objects.append(disruption_budget(name))
    if engine.signals is not None:
        objects.append(service_monitor(engine, serving, name, labels))
    return objects


def _router(engine: Engine, serving: Serving, prefill: list[str], decode: list[str]) -> list[Manifest]:
    image, launch = engine.router(serving, prefill, decode)
    name = f"{serving.name}-router"
    labels = object_labels(name, serving)
    template = pod_template(engine, replace(serving, tp=1, pp=1), launch, name, labels, image)
    container = template["spec"]["containers"][0]
    container["name"] = "router"
    container["resources"] = {"requests": {"cpu": "2", "memory": "2Gi"}, "limits": {"memory": "4Gi"}}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        container[probe] = {"tcpSocket": {"port": "http"}, "periodSeconds": 10, "failureThreshold": 6}
    container["startupProbe"]["failureThreshold"] = -(-serving.start_seconds // 10)  # it waits for its workers
    kept = ("files", "cache", "tmp")
    container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] in kept]
    template["spec"]["volumes"] = [volume for volume in template["spec"]["volumes"] if volume["name"] in kept]
    container["env"] = [variable for variable in container["env"] if variable["name"] != engine.key_variable]
    spec = {
        "replicas": 1,
        "selector": {"matchLabels": {"app.kubernetes.io/name": name}},
        "template": template,
    }
    return [
        *files_map(engine, name, launch),
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata(name, labels, serving), "spec": spec},
        service(name, engine.port, labels),
    ]
