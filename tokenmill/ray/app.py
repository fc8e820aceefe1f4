"""The Ray Serve application: replicas of the server, scaled by queue and KV use, behind an ingress that retries.

`application` makes it from settings; `builder` is for Ray's own tools (`serve run tokenmill.ray.app:builder
config=FILE`, or a RayService on Kubernetes); `deploy` puts it onto a cluster, and replaces one of the same name replica
by replica: new ones start before old ones end, and old ones answer what they have. Called by the CLI.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import ray
from ray import serve

from tokenmill.errors import UserError
from tokenmill.ray.ingress import Ingress
from tokenmill.ray.policy import QueueAndKvPolicy
from tokenmill.ray.replica import Replica
from tokenmill.ray.settings import RaySettings, read_settings
from tokenmill.serve.config import read_config_file

ENGINE, INGRESS = "engine", "ingress"
_MAX_ONGOING = 10_000  # of a replica: what is too much is refused by its own admission, in its own words
_CONSTRUCTOR_RETRIES = 3
_MAX_REASON = 500  # characters


def application(settings: RaySettings) -> serve.Application:
    config = settings.server
    bundle = settings.bundle
    engine = serve.deployment(
        name=ENGINE,
        ray_actor_options={"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)},
        placement_group_bundles=[bundle],
        placement_group_strategy="STRICT_PACK",
        max_ongoing_requests=_MAX_ONGOING,
        autoscaling_config=_autoscaling(settings),
        graceful_shutdown_timeout_s=config.shutdown_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5,
        max_constructor_retry_count=_CONSTRUCTOR_RETRIES,
        max_surge_percent=settings.surge_percent,
    )(Replica)

    def ingress_app() -> Ingress:
        return Ingress(serve.get_deployment_handle(ENGINE), config.max_body_bytes)

    ingress = serve.deployment(
        name=INGRESS,
        num_replicas=settings.ingress_replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_timeout_s=config.shutdown_timeout,
        max_surge_percent=settings.surge_percent,
    )(serve.ingress(ingress_app)())
    return ingress.bind(engine.bind(settings))


def _autoscaling(settings: RaySettings) -> dict[str, Any]:
    """Ray's delays and smoothing are off: the policy has windows of its own."""
    scaling = settings.autoscaling
    return {
        "min_replicas": scaling.min_replicas,
        "max_replicas": scaling.max_replicas,
        "look_back_period_s": scaling.tick_s,
        "metrics_interval_s": min(10.0, scaling.tick_s / 2),
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "policy": {
            "policy_function": f"{QueueAndKvPolicy.__module__}:{QueueAndKvPolicy.__name__}",
            "policy_kwargs": asdict(scaling),
        },
    }


def builder(arguments: Mapping[str, Any]) -> serve.Application:
    """`config`: path of the file, on the node that builds; or its content."""
    config = arguments.get("config")
    if isinstance(config, Mapping):
        return application(read_settings(config, "the arguments"))
    if not isinstance(config, str):
        raise UserError("the application has no argument `config`", "give the path of its file, or its content")
    return application(read_settings(read_config_file(config), config))


def join(address: str) -> bool:
    """The cluster at `address`; "": that of RAY_ADDRESS, or one that runs on this machine. False if there is none."""
    if ray.is_initialized():
        return True
    wanted = address or os.environ.get("RAY_ADDRESS") or "auto"
    if wanted == "local":  # Ray's word for a new one
        return False
    try:
        ray.init(address=wanted, log_to_driver=False, logging_level="warning")
        return True
    except (ConnectionError, ValueError) as error:
        if address:
            raise UserError(f"cannot join the Ray cluster at {address}: {error}", "check --address") from None
        return False


def connect(address: str) -> bool:
    """As `join`, or start a cluster of this machine alone, which ends with this process: whether it did."""
    if join(address):
        return False
    ray.init(address="local", logging_level="warning", include_dashboard=False)
    return True


def end() -> None:
    """Of a cluster that `connect` has started."""
    serve.shutdown()
    ray.shutdown()


def deploy(settings: RaySettings) -> str:
    """Onto the cluster that this process has joined; returns the address once every replica of the minimum is ready."""
    config = settings.server
    serve.start(http_options={"host": config.host, "port": config.port})
    try:
        serve.run(application(settings), name=settings.name, route_prefix=settings.route_prefix)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[-_MAX_REASON:]
        remedy = "correct it and deploy again; the logs of the replicas say more, and replicas that ran go on"
        raise UserError(f"{settings.name} does not start: {reason}", remedy) from None
    return f"http://{config.host}:{config.port}{settings.route_prefix.rstrip('/')}"


def status() -> dict[str, Any]:
    """Applications by name: their state, and replicas by deployment."""
    found = serve.status().applications
    return {
        name: {
            "status": str(app.status.value),
            "message": app.message,
            "deployments": {
                each: {"status": str(deployment.status.value), "replicas": dict(deployment.replica_states)}
                for each, deployment in app.deployments.items()
            },
        }
        for name, app in found.items()
    }


def delete(name: str) -> None:
    if name not in serve.status().applications:
        raise UserError(f"there is no application '{name}'", "see `tokenmill ray status`")
    serve.delete(name)
