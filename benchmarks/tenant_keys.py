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
    "max_pinned_share": 0.25,
    "max_sequences": 64,
    "max_queue_share": 0.5,
    "grammar_seconds_per_minute": 10,
    "cache": "private",
}
_PROBE = """
import sys, json, tempfile, os
from tokenmill.serve.keys import load_keys
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


def tree_environment() -> dict[str, str]:
    """Environment in which `python -m tokenmill` is the server under test."""
    tree = os.environ.get("TOKENMILL_TREE") or str(Path(__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (tree, os.environ.get("PYTHONPATH"))))}


@functools.cache
def accepted_limits() -> frozenset[str]:
    """Which limits of a key the server under test knows."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, json.dumps(_OPTIONAL)], env=tree_environment(), capture_output=True, text=True
    )
    return frozenset(json.loads(done.stdout) if done.returncode == 0 else ())


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
