"""Replicas that span nodes: a LeaderWorkerSet, whose groups of pods start and end together.

One pod per node; the leader has the port and the probes, the workers only compute. A pod that dies takes its group with
it, because the collectives of the others cannot go on. For engines whose ranks meet over the network. Called by
render.py.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

from tokenmill.deploy.engines.base import Engine, Launch
from tokenmill.deploy.kubernetes import (
    Manifest,
    device_resource,
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

_LEADER = {"tokenmill/role": "leader"}


def group_manifests(engine: Engine, serving: Serving, launch: Launch, nodes: int) -> list[Manifest]:
    if serving.devices % nodes or nodes < 2:
        problem = f"{serving.devices} devices of a replica do not divide among {nodes} nodes"
        raise UserError(problem, "give --nodes 2 or more, of equal shares")
    name, labels = serving.name, object_labels(serving.name, serving)
    leader = _pod(engine, serving, launch, nodes, is_leader=True)
    worker = _pod(engine, serving, launch, nodes, is_leader=False)
    group = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata(name, labels, serving),
        "spec": {
            "replicas": serving.replicas,
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxUnavailable": 0, "maxSurge": 1},
            },
            "leaderWorkerTemplate": {
                "size": nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": leader,
                "workerTemplate": worker,
            },
        },
    }
    front = service(name, engine.port, labels)
    front["spec"]["selector"] |= _LEADER
    objects = [weights_claim(serving), *files_map(engine, name, launch), group, front, disruption_budget(name)]
    objects.append(network_policy(engine, serving, split=True))
    if engine.signals is not None:
        objects.append(service_monitor(engine, serving, name, labels))
    return objects


def _pod(engine: Engine, serving: Serving, launch: Launch, nodes: int, is_leader: bool) -> Manifest:
    labels = object_labels(serving.name, serving) | (_LEADER if is_leader else {})
    words = launch.command + engine.node_arguments(nodes, is_leader)
    template = deepcopy(pod_template(engine, serving, replace(launch, command=words), serving.name, labels))
    container = template["spec"]["containers"][0]
    share = {device_resource(serving): str(serving.devices // nodes)}
    container["resources"]["requests"] |= {"cpu": str(4 * serving.devices // nodes), **share}
    container["resources"]["limits"] |= share
    if not is_leader:
        for each in ("ports", "startupProbe", "readinessProbe", "livenessProbe"):
            del container[each]
    return template
