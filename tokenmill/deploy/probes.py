"""Liveness checks: the engine's own where it watches token progress, else a script of ours.

The script reads the engine's metrics and fails if requests run but the token counter has not changed since last time. A
server that merely accepts connections passes the usual check while its engine hangs. Used by all targets.
"""

from __future__ import annotations

from tokenmill.deploy.engines.base import Engine

SCRIPT_NAME = "progress.sh"
FILES_FOLDER = "/etc/serving"

_SCRIPT = """\
#!/bin/sh
# Exit 1 if requests run but no token was generated since the last check. Written by `tokenmill deploy`.
memory=${{1:-/tmp/serving-progress}}
text=$(curl --fail --silent --max-time 10 {key}http://127.0.0.1:{port}{path}) || exit 1
total() {{
  printf '%s\\n' "$text" | awk -v name="$1" '
    index($0, name "{{") == 1 || index($0, name " ") == 1 {{ sum += $NF }}
    END {{ printf "%.0f", sum }}'
}}
now=$(total '{tokens}')
before=$(cat "$memory" 2>/dev/null || true)
printf '%s' "$now" > "$memory"
if [ "$(total '{running}')" -gt 0 ] && [ "$now" = "$before" ]; then exit 1; fi
"""


def progress_script(engine: Engine) -> str:
    """Source of the check (sh, curl, awk: in every image), or nothing where the engine's own is enough or nothing is
    measured."""
    signals = engine.signals
    if engine.health_sees_progress or signals is None or not (signals.running and signals.tokens):
        return ""
    key = f'--header "Authorization: Bearer ${{{engine.key_variable}:-}}" ' if engine.metrics_need_key else ""
    return _SCRIPT.format(port=engine.port, path=signals.path, running=signals.running, tokens=signals.tokens, key=key)


def progress_command(engine: Engine) -> list[str]:
    return ["sh", f"{FILES_FOLDER}/{SCRIPT_NAME}"] if progress_script(engine) else []
