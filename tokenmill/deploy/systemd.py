"""systemd units: the server, and a timer that restarts it when its health check reports no progress."""

from __future__ import annotations

from tokenmill.deploy.engines.base import Engine, Launch
from tokenmill.deploy.probes import FILES_FOLDER
from tokenmill.deploy.serving import Serving

_VISIBLE = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES"}


def units(engine: Engine, serving: Serving, launch: Launch) -> dict[str, str]:
    """File name -> text; one server per replica, each on its own devices and port."""
    files = {}
    for replica in range(serving.replicas):
        name = serving.name if serving.replicas == 1 else f"{serving.name}-{replica}"
        port = engine.port + replica
        files[f"{name}.service"] = _server(engine, serving, launch, replica, port)
        files[f"{name}-probe.service"] = _probe(engine, name, port)
        files[f"{name}-probe.timer"] = _timer(serving, name)
    return files


def _server(engine: Engine, serving: Serving, launch: Launch, replica: int, port: int) -> str:
    command = [str(port) if each == str(engine.port) else each for each in launch.command]
    environment = [(key, value.replace(str(engine.port), str(port))) for key, value in launch.environment]
    if serving.on_gpu and serving.device.vendor in _VISIBLE:
        first = replica * serving.devices
        ids = ",".join(str(first + each) for each in range(serving.devices))
        environment.append((_VISIBLE[serving.device.vendor], ids))
    lines = [
        "[Unit]",
        f"Description={engine.name} serving {serving.name}",
        "Wants=network-online.target",
        "After=network-online.target",
        "",
        "[Service]",
        "Type=exec",
        *(f"Environment={quote(f'{key}={value}')}" for key, value in environment),
        f"EnvironmentFile=-/etc/default/{serving.name}",
        f"ExecStart=/usr/bin/env {' '.join(quote(each) for each in command)}",
        "DynamicUser=yes",
        f"StateDirectory={serving.name}",
        f"Environment=HF_HOME=/var/lib/{serving.name}/hub",
        "Restart=on-failure",
        "RestartSec=5",
        "KillSignal=SIGTERM",
        "TimeoutStopSec=120",
        "LimitNOFILE=1048576",
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "ProtectHome=read-only",
        "PrivateTmp=yes",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
        "",
    ]
    if launch.files:
        lines.insert(1, f"# needs the written files in {FILES_FOLDER}")
    return "\n".join(lines)


def _probe(engine: Engine, name: str, port: int) -> str:
    """Three checks, ten seconds apart; if all fail, the server is restarted."""
    look = "curl --fail --silent --max-time 25 --retry 2 --retry-delay 10 --retry-all-errors -o /dev/null"
    command = f"{look} http://127.0.0.1:{port}{engine.health} || systemctl restart {name}.service"
    return (
        f"[Unit]\nDescription=Check that {name} generates tokens\nAfter={name}.service\n\n"
        f"[Service]\nType=oneshot\nExecStart=/bin/sh -c {quote(command)}\n"
    )


def _timer(serving: Serving, name: str) -> str:
    """Starts with the server, so that every cold start gets its time."""
    return (
        f"[Unit]\nDescription=Probe of {name}\nPartOf={name}.service\nAfter={name}.service\n\n"
        f"[Timer]\nOnActiveSec={serving.start_seconds}\nOnUnitInactiveSec=30\n\n"
        f"[Install]\nWantedBy={name}.service\n"
    )


def quote(text: str) -> str:
    """As systemd reads it: percent and dollar are its own, quotes keep spaces and JSON together."""
    text = text.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$")
    if any(character in text for character in " \t'\";"):
        return '"' + text.replace('"', '\\"') + '"'
    return text
