"""SGLang: `sglang.launch_server`, on a GPU."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from importlib.util import find_spec
from pathlib import Path

from tokenmill.deploy.engines.base import Launch
from tokenmill.optimize.rivals.base import Rival, is_hf_folder, this_device, with_address


class SGLangRival(Rival):
    name = "sglang"
    engine = "sglang"
    dialect = "sglang"

    def missing(self) -> str:
        return "" if find_spec("sglang") else "pip install 'sglang[all]'"

    def version(self) -> str:
        try:
            return f"sglang {package_version('sglang')}"
        except PackageNotFoundError:
            return "sglang"

    def serves(self, path: Path) -> str:
        if this_device().kind != "gpu":
            return "SGLang needs a GPU"
        return "" if is_hf_folder(path) else "SGLang reads folders of safetensors with a config.json"

    def localized(self, launch: Launch, port: int) -> list[str]:
        """Started by this Python, which has the package."""
        command = with_address(launch.command, port)
        return [sys.executable, *command[1:]] if command[0].startswith("python") else command
