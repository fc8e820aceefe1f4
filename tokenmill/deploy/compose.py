"""A docker compose file: one service per replica on its own devices and port, weights in one volume, health checked."""

from __future__ import annotations

from typing import Any

from tokenmill.deploy.engines.base import WEIGHTS_FOLDER, Engine, Launch
from tokenmill.deploy.probes import FILES_FOLDER, SCRIPT_NAME, progress_command, progress_script
from tokenmill.deploy.serving import Serving


def compose(engine: Engine, serving: Serving, launch: Launch) -> dict[str, Any]:
    services = {}
    for replica in range(serving.replicas):
        name = serving.name if serving.replicas == 1 else f"{serving.name}-{replica}"
        services[name] = _service(engine, serving, launch, replica)
    return {"name": serving.name, "services": services, "volumes": {"weights": {}}}


def compose_files(engine: Engine, launch: Launch) -> dict[str, str]:
    """What the services mount, to lie in `files/` beside the compose file."""
    script = progress_script(engine)
    return {f"files/{name}": text for name, text in (launch.files | ({SCRIPT_NAME: script} if script else {})).items()}


def _service(engine: Engine, serving: Serving, launch: Launch, replica: int) -> dict[str, Any]:
    volumes = [f"weights:{WEIGHTS_FOLDER}"]
    if compose_files(engine, launch):
        volumes.append(f"./files:{FILES_FOLDER}:ro")
    url = f"http://127.0.0.1:{engine.port}{engine.health}"
    test = progress_command(engine) or ["curl", "--fail", "--silent", "--max-time", "20", url]
    service: dict[str, Any] = {
        "image": engine.image_for(serving),
        "entrypoint": [_dollars(launch.command[0])],
        "command": [_dollars(each) for each in launch.command[1:]],
        "environment": {
            "HF_HOME": f"{WEIGHTS_FOLDER}/hub",
            "HF_TOKEN": "${HF_TOKEN:-}",
            **{name: _dollars(value) for name, value in launch.environment},
        },
        "ports": [f"{engine.port + replica}:{engine.port}"],
        "volumes": volumes,
        "shm_size": f"{max(2, 2 * serving.devices)}gb",
        "restart": "unless-stopped",
        "stop_grace_period": "120s",
        "healthcheck": {
            "test": ["CMD", *test],
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
