"""llama.cpp: `llama-server` where it is on the PATH, else the same server from the package xllamacpp, else
`llama_cpp.server` of llama-cpp-python, which computes one request at a time."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from tokenmill.deploy.engines.base import Launch
from tokenmill.optimize.rivals.base import Rival, is_gguf, with_address

BINARY, NATIVE, PYTHON = "llama-server", "xllamacpp", "llama-cpp-python"
_INSTALL = "put llama-server on the PATH, or: pip install xllamacpp, or: pip install 'llama-cpp-python[server]'"

# Flags of llama-server -> of llama_cpp.server. It has no slots: `--parallel` and what belongs to it is left out.
_PYTHON_FLAGS = {
    "--model": "--model",
    "--host": "--host",
    "--port": "--port",
    "--alias": "--model_alias",
    "--batch-size": "--n_batch",
    "--cache-type-k": "--type_k",
    "--cache-type-v": "--type_v",
    "--flash-attn": "--flash_attn",
    "--n-gpu-layers": "--n_gpu_layers",
}
_FEATURES = {  # of /proc/cpuinfo -> as llama.cpp says it
    "asimddp": "DOTPROD",
    "i8mm": "MATMUL_INT8",
    "avx2": "AVX2",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
}
_GGML_NUMBERS = {"f16": "1", "q4_0": "2", "q8_0": "8"}


class LlamaCppRival(Rival):
    name = "llama.cpp"
    engine = "llamacpp"

    def __init__(self, flavour: str = "") -> None:
        """`flavour`: one of the three servers; empty: the first that is installed."""
        self.flavour = flavour or next((each for each in (BINARY, NATIVE, PYTHON) if _installed(each)), "")

    def missing(self) -> str:
        return "" if self.flavour and _installed(self.flavour) else _INSTALL

    def version(self) -> str:
        if self.flavour == BINARY:
            said = subprocess.run([BINARY, "--version"], capture_output=True, text=True, timeout=20, check=False)
            match = re.search(r"version: (.+)", said.stderr + said.stdout)
            return f"{BINARY} {match[1].strip() if match else '(unknown version)'}"
        try:
            words = f"{self.flavour} {package_version(self.flavour)}"
        except PackageNotFoundError:
            words = self.flavour
        lacking = _lacking() if self.flavour == NATIVE else []
        return f"{words} (built without {', '.join(lacking)}, which this processor has)" if lacking else words

    def serves(self, path: Path) -> str:
        return "" if is_gguf(path) else "llama.cpp reads GGUF files only"

    def localized(self, launch: Launch, port: int) -> list[str]:
        command = with_address(launch.command, port)
        if self.flavour == NATIVE:
            return [sys.executable, "-m", "tokenmill.optimize.rivals.llamacpp_native", *command[1:]]
        if self.flavour == PYTHON:
            return [sys.executable, "-m", "llama_cpp.server", *python_flags(command[1:])]
        return command


def python_flags(flags: Sequence[str]) -> list[str]:
    """The launch line's flags in the spelling of llama_cpp.server; the context is that of one slot."""
    values = dict(pairwise(flags))
    words: list[str] = []
    for flag, name in _PYTHON_FLAGS.items():
        if flag in values:
            value = values[flag]
            value = _GGML_NUMBERS.get(value, value) if flag.startswith("--cache-type") else value
            words += [name, "true" if value == "on" else value]
    slots = int(values.get("--parallel", "1"))
    return [*words, "--n_ctx", str(int(values["--ctx-size"]) // slots)]


def _lacking() -> list[str]:
    """Instruction sets of this processor that the package was built without: a llama-server built here is faster."""
    import xllamacpp  # type: ignore[import-not-found, import-untyped, unused-ignore]

    try:
        features = set(
            re.findall(r"^(?:Features|flags)\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.M)[0].split()
        )
    except (OSError, IndexError):
        return []
    built = str(xllamacpp.get_system_info())
    return [name for flag, name in _FEATURES.items() if flag in features and f"{name} = 1" not in built]


def _installed(flavour: str) -> bool:
    if flavour == BINARY:
        return shutil.which(BINARY) is not None
    if flavour == NATIVE:
        return find_spec("xllamacpp") is not None
    needed = ("llama_cpp", "fastapi", "uvicorn", "sse_starlette", "starlette_context", "pydantic_settings")
    return all(find_spec(name) is not None for name in needed)
