"""What makes all targets safe as they come: API keys, the user, folders that are written, how long a stop takes.

Keys never stand in a rendered file. Each target refers to a secret that `create-keys.sh` makes, and a server does not
start without it. Knows engines only by their contract. Used by kubernetes.py, compose.py, systemd.py and render.py.
"""

from __future__ import annotations

import shlex

from tokenmill.deploy.engines.base import METRICS_KEY, PEER_KEY, WEIGHTS_FOLDER, Engine
from tokenmill.deploy.serving import SHUTDOWN_SECONDS

USER_ID = 1000  # the user of our images; other images run as any user that has no name
CACHE_FOLDER = "/cache"  # compiled kernels and what libraries keep in a home folder
KEYS_FOLDER = "/run/serving-keys"
KEYS_FILE = "keys.yaml"
SECRET_KEY = "key"

PRE_STOP_SECONDS = 10  # endpoints and proxies forget a pod before it refuses requests
STOP_SECONDS = SHUTDOWN_SECONDS + 20  # from SIGTERM to SIGKILL
GRACE_SECONDS = PRE_STOP_SECONDS + STOP_SECONDS


def environment(engine: Engine) -> list[tuple[str, str]]:
    """For a user without name or home on a read-only root file system."""
    variables = [("HOME", CACHE_FOLDER), ("USER", "serving"), ("XDG_CACHE_HOME", CACHE_FOLDER)]
    variables += [("HF_HOME", f"{WEIGHTS_FOLDER}/hub"), ("TRITON_CACHE_DIR", f"{CACHE_FOLDER}/triton")]
    if engine.name == "tokenmill":
        variables.append(("TOKENMILL_CACHE", WEIGHTS_FOLDER))
    return variables


def has_keys(engine: Engine) -> bool:
    return bool(engine.keys_file_flag or engine.key_variable)


def key_arguments(engine: Engine, keys_file: str, variable: str) -> list[str]:
    """What goes onto the launch line. `variable`: how the target writes the value of a variable into an argument."""
    if engine.keys_file_flag:
        return [engine.keys_file_flag, keys_file]
    return [engine.key_flag, variable] if engine.key_flag else []


def notes(engine: Engine) -> list[str]:
    if has_keys(engine):
        return ["run create-keys.sh once: the server does not start without API keys"]
    return [f"{engine.name} has no API keys: let only a gateway that checks them reach it"]


def create_keys_script(engine: Engine, target: str, name: str) -> list[str]:
    """Lines of a script that makes random keys where the target looks for them, unless they are there."""
    if engine.keys_file_flag:
        entries = "keys:\\n- name: client\\n  key: sk-%s\\n- name: metrics\\n  key: %s\\n  metrics: true\\n"
        keys = f'printf "{entries}" "$(random)" "$metrics"'
        if target == "kubernetes":  # where servers and a router ask each other
            keys = f'printf "{entries}- name: peer\\n  key: %s\\n  admin: true\\n" "$(random)" "$metrics" "$peer"'
    else:
        keys = f'printf "{engine.key_variable}=sk-%s\\n" "$(random)"'
    lines = ["umask 077", "random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \\n'; }", 'metrics="sk-$(random)"']
    lines += ['peer="sk-$(random)"'] if target == "kubernetes" else []
    secret = shlex.quote(f"{name}-api-keys")
    if target == "kubernetes":
        found = f"kubectl get secret {secret} >/dev/null 2>&1 && {{ echo 'the secret exists'; exit 0; }}"
        if engine.keys_file_flag:
            literals = f'--from-literal={KEYS_FILE}="$({keys})" --from-literal={METRICS_KEY}="$metrics"'
            literals += f' --from-literal={PEER_KEY}="$peer"'
        else:
            literals = f'--from-literal={SECRET_KEY}="sk-$(random)"'
        return [*lines, found, f"kubectl create secret generic {secret} {literals}"]
    path = {"compose": "api-keys.yaml" if engine.keys_file_flag else ".env"}.get(target, f"/etc/{name}/api-keys")
    folder = [] if target == "compose" else [f"mkdir -p {shlex.quote(f'/etc/{name}')}"]
    place = shlex.quote(path)
    return [*lines, *folder, f"[ -e {place} ] || {keys} > {place}", *_readable(engine, target, place)]


def _readable(engine: Engine, target: str, place: str) -> list[str]:
    """Compose mounts the file as it is: the user of the container must be able to read it."""
    if target != "compose" or not engine.keys_file_flag:
        return []
    return [f"chown {USER_ID} {place} || echo 'give {place} to user {USER_ID}, who runs the container' >&2"]


def health_command(engine: Engine, path: str, port: int) -> list[str]:
    """A check without curl where the image has Python."""
    url = f"http://127.0.0.1:{port}{path}"
    if engine.health_tool == "python":
        return ["python3", "-c", f"import urllib.request; urllib.request.urlopen({url!r}, timeout=20)"]
    if engine.health_tool == "curl":
        return ["curl", "--fail", "--silent", "--max-time", "20", url]
    return list(engine.health_tool.split())
