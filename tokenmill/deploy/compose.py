"""A docker compose file: one service per replica on its own devices and port, weights in one volume, health checked."""

from __future__ import annotations

from typing import Any

from tokenmill.deploy.engines.base import WEIGHTS_FOLDER, Engine, Launch
from tokenmill.deploy.hardening import (
    CACHE_FOLDER,
    STOP_SECONDS,
    USER_ID,
    environment,
    health_command,
    key_arguments,
)
from tokenmill.deploy.probes import FILES_FOLDER, SCRIPT_NAME, progress_command, progress_script
from tokenmill.deploy.serving import Serving


def compose(engine: Engine, serving: Serving, launch: Launch) -> dict[str, Any]:
    services = {}
    for replica in range(serving.replicas):
        name = serving.name if serving.replicas == 1 else f"{serving.name}-{replica}"
        services[name] = _service(engine, serving, launch, replica)
    found: dict[str, Any] = {"name": serving.name, "services": services, "volumes": {"weights": {}}}
    if engine.keys_file_flag:
        found["secrets"] = {"api-keys": {"file": "./api-keys.yaml"}}
    return found


def compose_files(engine: Engine, launch: Launch) -> dict[str, str]:
    """What the services mount, to lie in `files/` beside the compose file."""
    script = progress_script(engine)
    return {f"files/{name}": text for name, text in (launch.files | ({SCRIPT_NAME: script} if script else {})).items()}


def _service(engine: Engine, serving: Serving, launch: Launch, replica: int) -> dict[str, Any]:
    volumes = [f"weights:{WEIGHTS_FOLDER}"]
    if compose_files(engine, launch):
        volumes.append(f"./files:{FILES_FOLDER}:ro")
    test = progress_command(engine) or health_command(engine, engine.ready or engine.health, engine.port)
    required = f"${{{engine.key_variable}:?run create-keys.sh}}"  # compose refuses to start without it
    arguments = [_dollars(each) for each in launch.command[1:]]
    service: dict[str, Any] = {
        "image": engine.image_for(serving),
        "entrypoint": [_dollars(launch.command[0])],
        "command": arguments + key_arguments(engine, "/run/secrets/api-keys", required),
        "environment": {
            "HF_TOKEN": "${HF_TOKEN:-}",
            **dict(environment(engine)),
            **({engine.key_variable: required} if engine.key_variable and not engine.keys_file_flag else {}),
            **{name: _dollars(value) for name, value in launch.environment},
        },
        # On the loopback interface: a proxy with TLS in front decides who else may call.
        "ports": [f"127.0.0.1:{engine.port + replica}:{engine.port}"],
        "volumes": volumes,
        **({"secrets": ["api-keys"]} if engine.keys_file_flag else {}),
        "user": f"{USER_ID}:{USER_ID}",
        "read_only": True,
        "tmpfs": ["/tmp:size=2g,mode=1777", f"{CACHE_FOLDER}:size=10g,uid={USER_ID},gid={USER_ID},exec"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "pids_limit": 4096,
        "shm_size": f"{max(2, 2 * serving.devices)}gb",
        "restart": "unless-stopped",
        "stop_grace_period": f"{STOP_SECONDS}s",
        "healthcheck": {
            "test": ["CMD", *(_dollars(each) for each in test)],
            "interval": "30s",
            "timeout": "25s",
            "retries": 3,
            "start_period": f"{serving.start_seconds}s",
        },
    }
    if serving.on_gpu:
        first = replica * serving.devices
        ids = [str(first + each) for each in range(serving.devices)]
        if serving.device.vendor == "nvidia":
            devices = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
            service["deploy"] = {"resources": {"reservations": {"devices": [devices]}}}
        else:
            service["devices"] = ["/dev/kfd", "/dev/dri"] if serving.device.vendor == "amd" else ["/dev/dri"]
            service["environment"]["HIP_VISIBLE_DEVICES"] = ",".join(ids)
    return service


def _dollars(text: str) -> str:
    """Compose replaces variables; a doubled dollar stays one."""
    return text.replace("$", "$$")
