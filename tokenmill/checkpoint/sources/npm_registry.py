"""The npm registry: which one the user has configured, and where it keeps the tarball of a pinned package.

npm itself need not be installed: a registry is JSON over HTTP. Downloads nothing large. Called by fetch.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from urllib.parse import quote, urlsplit, urlunsplit

from tokenmill.checkpoint.sources.aliases import Package
from tokenmill.checkpoint.sources.download import Refused, Transport, Unreachable, shown
from tokenmill.checkpoint.sources.pip_index import Link

DEFAULT_REGISTRY = "https://registry.npmjs.org"


def read_npm_registry() -> str:
    for name in ("npm_config_registry", "NPM_CONFIG_REGISTRY"):
        if os.environ.get(name):
            return os.environ[name]
    if npm := shutil.which("npm"):
        answer = subprocess.run(
            [npm, "config", "get", "registry"], capture_output=True, text=True, timeout=60, check=False
        )
        lines = answer.stdout.split()
        if answer.returncode == 0 and lines and "://" in lines[-1]:
            return lines[-1]
    return DEFAULT_REGISTRY


def tarball_links(package: Package, registry: str, transport: Transport, failures: list[Exception]) -> Iterator[Link]:
    root = f"{registry.rstrip('/')}/{quote(package.name, safe='@')}"
    try:  # the document of one version is small, but some registries only have the one of all versions
        document = json.loads(transport.page(f"{root}/{package.version}", "application/json").body)
    except (Refused, ValueError):
        try:
            document = json.loads(transport.page(root, "application/json").body)["versions"][package.version]
        except (Refused, Unreachable) as error:
            failures.append(error)
            return
        except (ValueError, KeyError, TypeError):
            failures.append(Refused(f"{shown(root)}: no version {package.version}"))
            return
    except Unreachable as error:
        failures.append(error)
        return
    try:
        yield Link(_at_registry(document["dist"]["tarball"], registry))
    except (KeyError, TypeError):
        failures.append(Refused(f"{shown(root)}: names no tarball"))


def _at_registry(tarball: str, registry: str) -> str:
    """Mirrors often hand out the public host in their documents; like npm, stay with the configured registry then."""
    parts, configured = urlsplit(tarball), urlsplit(registry)
    if parts.netloc != urlsplit(DEFAULT_REGISTRY).netloc or configured.netloc == parts.netloc:
        return tarball
    return urlunsplit(
        parts._replace(
            scheme=configured.scheme, netloc=configured.netloc, path=configured.path.rstrip("/") + parts.path
        )
    )
