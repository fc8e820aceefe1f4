"""Which Kubernetes objects a deployment consists of, by file, and the kustomization that binds them.

The base is a plain kustomize one, not a Helm chart: every object is complete as it stands, can be read, diffed and
checked against its schema without a template engine, and what differs from cluster to cluster (namespace, image
registry, storage class, replicas) is what overlays are for. Called by render.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenmill.deploy.autoscaling import PROMETHEUS, ScaleTarget, autoscaler
from tokenmill.deploy.engines.base import Engine, Launch
from tokenmill.deploy.gateway import gateway_objects
from tokenmill.deploy.groups import group_manifests
from tokenmill.deploy.kubernetes import Manifest, manifests
from tokenmill.deploy.serving import Serving
from tokenmill.deploy.split import pool_name, routed_manifests, split_manifests
from tokenmill.errors import UserError


@dataclass(frozen=True, slots=True)
class Cluster:
    """What is asked of a Kubernetes deployment beyond the engine."""

    split: tuple[int, int] | None = None  # replicas that prefill and that decode
    router: bool = False  # this engine's router in front of one pool
    nodes: int = 1  # that a replica spans
    gateway: str = ""  # name of a Gateway whose requests come through an InferencePool
    scaler: str = "keda"
    prometheus: str = PROMETHEUS
    max_replicas: int = 0  # 0: twice the plan's

    def __post_init__(self) -> None:
        shapes = {"--split": self.split, "--router": self.router, "--nodes": self.nodes > 1}
        given = [name for name, value in shapes.items() if value]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} are given together", "give one of them")
        if self.split and self.gateway:
            raise UserError("--split has a router of its own, --gateway is given too", "drop one of them")


def cluster_files(engine: Engine, serving: Serving, launch: Launch, asked: Cluster) -> dict[str, list[Manifest]]:
    most = max(serving.replicas, asked.max_replicas or 2 * serving.replicas)
    target = ScaleTarget("apps/v1", "Deployment", serving.name)
    if asked.split:
        return _bound({"split.yaml": split_manifests(engine, serving, asked.split)}, serving)
    if asked.nodes > 1:
        files = {"serving.yaml": group_manifests(engine, serving, launch, asked.nodes)}
        target = ScaleTarget("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", serving.name)
    elif asked.router:
        files = {"serving.yaml": routed_manifests(engine, serving, launch, most)}
        target = ScaleTarget("apps/v1", "StatefulSet", pool_name(serving))
    else:
        files = {"serving.yaml": manifests(engine, serving, launch)}
    scaling = autoscaler(asked.scaler, engine, serving, asked.prometheus, most, target)
    if scaling:
        files["autoscaling.yaml"] = scaling
    if asked.gateway:
        files["gateway.yaml"] = gateway_objects(engine, serving, asked.gateway, target.name)
    return _bound(files, serving)


def _bound(files: dict[str, list[Manifest]], serving: Serving) -> dict[str, list[Manifest]]:
    """With a kustomization, which names the images so that an overlay can point them at a registry."""
    images = sorted({image for objects in files.values() for each in objects for image in _images(each)})
    kustomization: Manifest = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(files),
        "labels": [{"pairs": {"app.kubernetes.io/part-of": serving.name}}],
        "images": [{"name": image.rpartition(":")[0], "newTag": image.rpartition(":")[2]} for image in images],
    }
    return files | {"kustomization.yaml": [kustomization]}


def _images(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        for container in part.get("containers", ()):
            yield container["image"]
        for each in part.values():
            yield from _images(each)
