"""vLLM: `vllm serve`, on a GPU or with its CPU build."""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from importlib.util import find_spec
from pathlib import Path

from tokenmill.deploy.engines.base import Launch
from tokenmill.optimize.rivals.base import Rival, is_hf_folder, with_address


class VllmRival(Rival):
    name = "vllm"
    engine = "vllm"
    dialect = "vllm"

    def missing(self) -> str:
        return "" if shutil.which("vllm") or find_spec("vllm") else "pip install vllm"

    def version(self) -> str:
        try:
            return f"vllm {package_version('vllm')}"
        except PackageNotFoundError:  # only the command is there
            return "vllm"

    def serves(self, path: Path) -> str:
        return "" if is_hf_folder(path) else "vLLM reads folders of safetensors with a config.json"

    def localized(self, launch: Launch, port: int) -> list[str]:
        command = with_address(launch.command, port)
        if shutil.which(command[0]) is None:
            command[:1] = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
        return command
