"""Pools whose pods have names of their own, and a router in front: one pool, or prefill and decode apart.

Split: a prompt is computed in one pool and its KV handed to the other: long prompts then never stall running answers.
Pools are StatefulSets, because a router and peers need addresses that stay. Only for engines that have a router. Called
by render.py.
"""

from __future__ import annotations

from dataclasses import replace

from tokenmill.deploy.engines.base import Engine, Launch
from tokenmill.deploy.kubernetes import (
    Manifest,
    disruption_budget,
    files_map,
    metadata,
    network_policy,
    object_labels,
    pod_template,
    probes,
    service,
    service_monitor,
    weights_claim,
)
from tokenmill.deploy.serving import Serving
from tokenmill.errors import UserError

_ROUTERS = 2  # of ours, which keep no state that matters; others find their workers once


def parse_split(text: str) -> tuple[int, int]:
    """ "2:4" -> two prefill and four decode replicas."""
    prefill, _, decode = text.partition(":")
    if not (prefill.isdigit() and decode.isdigit() and int(prefill) > 0 and int(decode) > 0):
        raise UserError(f"'{text}' is not a split", "write PREFILL:DECODE replicas, such as 1:2")
    return int(prefill), int(decode)


def split_manifests(engine: Engine, serving: Serving, split: tuple[int, int]) -> list[Manifest]:
    if not engine.can_split:
        engine.router(serving, ("prefill",), ("decode",))  # says why
    prefill, decode = (
        _hosts(f"{serving.name}-{role}", count) for role, count in zip(("prefill", "decode"), split, strict=True)
    )
    objects = [weights_claim(serving)]
    objects += _pool(engine, serving, f"{serving.name}-prefill", engine.launch(serving, "prefill"), split[0])
    launch = engine.launch(serving, "decode")
    launch = replace(launch, command=launch.command + engine.peers(prefill))
    objects += _pool(engine, serving, f"{serving.name}-decode", launch, split[1])
    objects += _router(engine, serving, prefill, decode)
    return [*objects, network_policy(engine, serving, split=True)]


def pool_name(serving: Serving) -> str:
    return f"{serving.name}-pool"


def routed_manifests(engine: Engine, serving: Serving, launch: Launch, max_replicas: int) -> list[Manifest]:
    """The router knows as many replicas as there may ever be: those that do not run count as dead."""
    if not engine.can_route:
        raise UserError(f"{engine.name} has no router for one pool", "drop --router, or put a gateway in front")
    name = pool_name(serving)
    objects = [weights_claim(serving), *_pool(engine, serving, name, launch, serving.replicas)]
    objects += _router(engine, serving, [], _hosts(name, max(max_replicas, serving.replicas)))
    return [*objects, network_policy(engine, serving, split=True)]


def _hosts(name: str, count: int) -> list[str]:
    return [f"{name}-{number}.{name}" for number in range(count)]


def _pool(engine: Engine, serving: Serving, name: str, launch: Launch, count: int) -> list[Manifest]:
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
    template["spec"].pop("tolerations", None)  # it needs no device
    if engine.can_route:
        container |= probes(engine, serving)
    else:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            container[probe] = {"tcpSocket": {"port": "http"}, "periodSeconds": 10, "failureThreshold": 6}
        container["startupProbe"]["failureThreshold"] = -(-serving.start_seconds // 10)  # it waits for its workers
    kept = ("files", "cache", "tmp") + (("weights",) if engine.can_route else ())  # ours reads the tokenizer there
    container["volumeMounts"] = [
        mount | ({"readOnly": True} if mount["name"] == "weights" else {})
        for mount in container["volumeMounts"]
        if mount["name"] in kept
    ]
    template["spec"]["volumes"] = [volume for volume in template["spec"]["volumes"] if volume["name"] in kept]
    container["env"] = [variable for variable in container["env"] if variable["name"] != engine.key_variable]
    spec = {
        "replicas": _ROUTERS if engine.can_route else 1,
        "selector": {"matchLabels": {"app.kubernetes.io/name": name}},
        "template": template,
    }
    objects = [
        *files_map(engine, name, launch),
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata(name, labels, serving), "spec": spec},
        service(name, engine.port, labels),
    ]
    if engine.can_route:
        objects += [disruption_budget(name), service_monitor(engine, serving, name, labels)]
    return objects
