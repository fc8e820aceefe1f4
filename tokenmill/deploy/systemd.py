"""systemd units: the server, and a timer that restarts it when its health check reports no progress."""

from __future__ import annotations

from tokenmill.deploy.engines.base import Engine, Launch
from tokenmill.deploy.hardening import STOP_SECONDS, key_arguments
from tokenmill.deploy.probes import FILES_FOLDER
from tokenmill.deploy.serving import Serving

_HARDENING = (
    "NoNewPrivileges=yes",
    "CapabilityBoundingSet=",
    "ProtectSystem=strict",
    "ProtectHome=yes",
    "PrivateTmp=yes",
    "ProtectKernelTunables=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelLogs=yes",
    "ProtectControlGroups=yes",
    "ProtectClock=yes",
    "ProtectHostname=yes",
    "ProtectProc=invisible",
    "RestrictSUIDSGID=yes",
    "RestrictRealtime=yes",
    "RestrictNamespaces=yes",
    "LockPersonality=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6",
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service",
    "SystemCallErrorNumber=EPERM",
)
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
    state = f"/var/lib/{serving.name}"
    environment += [
        ("HOME", state),
        ("USER", "serving"),
        ("HF_HOME", f"{state}/hub"),
        ("XDG_CACHE_HOME", f"{state}/cache"),
    ]
    words = [quote(each) for each in command] + key_arguments(engine, "%d/api-keys", f"${{{engine.key_variable}}}")
    lines = [
        "[Unit]",
        f"Description={engine.name} serving {serving.name}",
        "Wants=network-online.target",
        "After=network-online.target",
        "StartLimitIntervalSec=600",
        "StartLimitBurst=5",
        "",
        "[Service]",
        "Type=exec",
        *(f"Environment={quote(f'{key}={value}')}" for key, value in environment),
        f"EnvironmentFile=-/etc/default/{serving.name}",
        *_keys(engine, serving.name),
        f"ExecStart=/usr/bin/env {' '.join(words)}",
        "DynamicUser=yes",
        f"StateDirectory={serving.name}",
        "StateDirectoryMode=0700",
        "UMask=0077",
        "Restart=on-failure",
        "RestartSec=5",
        "KillSignal=SIGTERM",
        f"TimeoutStopSec={STOP_SECONDS}",
        "LimitNOFILE=1048576",
        "LimitCORE=0",
        *_HARDENING,
        *(["PrivateDevices=yes"] if not serving.on_gpu else []),
        "",
        "[Install]",
        "WantedBy=multi-user.target",
        "",
    ]
    if launch.files:
        lines.insert(1, f"# needs the written files in {FILES_FOLDER}")
    return "\n".join(lines)


def _keys(engine: Engine, name: str) -> list[str]:
    """The file is root's; systemd hands it to the unit alone, and does not start the unit without it."""
    if engine.keys_file_flag:
        return [f"LoadCredential=api-keys:/etc/{name}/api-keys"]
    return [f"EnvironmentFile=/etc/{name}/api-keys"] if engine.key_variable else []


def _probe(engine: Engine, name: str, port: int) -> str:
    """Three checks, ten seconds apart; if all fail, the server is restarted."""
    url = f"http://127.0.0.1:{port}{engine.live or engine.health}"
    look = f"python3 -c \"import urllib.request as r; r.urlopen('{url}', timeout=20)\" 2>/dev/null && exit 0"
    command = f"for each in 1 2 3; do {look}; sleep 10; done; systemctl restart {name}.service"
    return (
        f"[Unit]\nDescription=Check that {name} answers\nAfter={name}.service\n\n"
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
