"""An environment for the tests of tests/fleet: this one's packages and Ray beside them; printed as its Python.

    $(python tools/ray_venv.py) -m pytest tests/fleet

Ray brings several hundred megabytes and versions of its own, which the project itself must not depend on. The folder is
.ray, or TOKENMILL_RAY; it is made anew when the extra `ray` of pyproject.toml changes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def wanted() -> list[str]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        packages: list[str] = tomllib.load(file)["project"]["optional-dependencies"]["ray"]
    return packages


def prepare(folder: Path, packages: list[str]) -> Path:
    python, mark = folder / "bin/python", folder / "installed.txt"
    listed = "\n".join([sys.prefix, *packages])
    if not mark.exists() or mark.read_text() != listed:
        venv.create(folder, clear=True, symlinks=True, with_pip=True)
        ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
        own = subprocess.check_output([python, "-c", ask], text=True)
        # A site folder of its own right: what it says of editable installs counts too.
        line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (Path(own.strip()) / "project.pth").write_text(line)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        subprocess.run(install, check=True, stdout=sys.stderr)
        mark.write_text(listed)
    return python


if __name__ == "__main__":
    print(prepare(Path(os.environ.get("TOKENMILL_RAY", ROOT / ".ray")), wanted()))
