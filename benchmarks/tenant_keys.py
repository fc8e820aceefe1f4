"""A keys file with several tenants, for the programs and tests that attack a server on behalf of some of them.

Limits that the server under test does not know yet are left out, so that the same tenants can be given to an older
tree. `TOKENMILL_TREE` names another source tree whose server is started instead of this one.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_OPTIONAL = {
    "max_priority": 0,
    "max_pinned_share": 0.2,
    "max_sequences": 64,
    "max_queue_share": 0.5,
    "grammar_seconds_per_minute": 10,
    "cache": "private",
    "metrics": True,
}
_PROBE = """
import sys, json, tempfile, os
try:
    from tokenmill.serve.tenants.key_file import load_keys
except ImportError:
    from tokenmill.serve.tenants.keys import load_keys
accepted = []
for name, value in json.loads(sys.argv[1]).items():
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as file:
        json.dump({"keys": [{"key": "probe-key-0123456789", "name": "probe", name: value}]}, file)
    try:
        load_keys((), file.name)
        accepted.append(name)
    except Exception:
        pass
    os.unlink(file.name)
print(json.dumps(accepted))
"""


def tree() -> Path:
    """The source tree whose server is started: `python -m tokenmill` takes the package of its working directory."""
    return Path(os.environ.get("TOKENMILL_TREE") or Path(__file__).parents[1])


@functools.cache
def accepted_limits() -> frozenset[str]:
    """Which limits of a key the server under test knows."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, json.dumps(_OPTIONAL)], cwd=tree(), capture_output=True, text=True
    )
    return frozenset(json.loads(done.stdout) if done.returncode == 0 else ())


@functools.cache
def _server_options() -> frozenset[str]:
    program = "from tokenmill.serve.config import ServeConfig; print(*ServeConfig.__dataclass_fields__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tree(), capture_output=True, text=True)
    return frozenset(done.stdout.split())


def known_flags(**options: str) -> list[str]:
    """Flags of the server under test; those that it does not have are left out."""
    known = {name: value for name, value in options.items() if name in _server_options()}
    return [word for name, value in known.items() for word in ("--" + name.replace("_", "-"), value)]


def key_of(tenant: str) -> str:
    return f"secret-of-{tenant}-5f1d0c"


def write_keys(path: Path, tenants: Sequence[str], limits: Mapping[str, Mapping[str, Any]] | None = None) -> Path:
    """One key per tenant; `limits` by tenant, of which the server gets those that it knows."""
    entries = []
    for name in tenants:
        wanted = (limits or {}).get(name, {})
        unknown = set(_OPTIONAL) - accepted_limits()
        known = {field: value for field, value in wanted.items() if field not in unknown}
        entries.append({"key": key_of(name), "name": name, **known})
    path.write_text(json.dumps({"keys": entries}))
    return path
