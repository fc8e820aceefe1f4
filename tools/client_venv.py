"""An environment for the clients that tests/clients drives the server with: made once, printed as its Python.

    $(python tools/client_venv.py) -m pytest tests/clients

The packages are those of the extra `clients` in pyproject.toml, without the project itself: several hundred megabytes
that nothing else needs. The folder is .clients, or TOKENMILL_CLIENTS; it is made anew when the list changes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def wanted() -> list[str]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        packages: list[str] = tomllib.load(file)["project"]["optional-dependencies"]["clients"]
    return packages


def prepare(folder: Path, packages: list[str]) -> Path:
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    mark = folder / "installed.txt"
    listed = "\n".join(packages)
    if not mark.exists() or mark.read_text() != listed:
        venv.create(folder, clear=True, symlinks=os.name != "nt", with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        subprocess.run(install, check=True, stdout=sys.stderr)
        mark.write_text(listed)
    return python


if __name__ == "__main__":
    print(prepare(Path(os.environ.get("TOKENMILL_CLIENTS", ROOT / ".clients")), wanted()))
