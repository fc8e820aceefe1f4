"""A model that exists as a config.json only, for benchmarks: its description, and no tensors.

The architecture says which weights it needs; model/dummy_reader.py makes them up. Opened by the engine under
`--load-format dummy`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tokenmill.checkpoint import hf_config
from tokenmill.checkpoint.base import StoredTensor
from tokenmill.checkpoint.safetensors import float_type_of, read_json
from tokenmill.errors import CheckpointError, UserError

MADE_UP_METHODS = ("fp8", "mxfp4", "compressed-tensors")


class DummyCheckpoint:
    """A Checkpoint without tensors."""

    def __init__(self, path: Path) -> None:
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path} has no config.json", "dummy weights need a directory with one")
        config = read_json(path / "config.json")
        self._quantization: dict[str, object] = config.get("quantization_config") or {}
        method, layout = self._quantization.get("quant_method"), self._quantization.get("format")
        packed = method != "compressed-tensors" or layout == "pack-quantized"
        if self._quantization and not (method in MADE_UP_METHODS and packed):
            raise UserError(
                f"{path} describes weights quantized by {method}" + ("" if packed else f" as {layout}"),
                f"only {', '.join(MADE_UP_METHODS)} (pack-quantized) can be made up: "
                "use a plain config.json and --quantization",
            )
        self.path, self._config = path, config
        description = hf_config.describe(config, None)
        self.description = replace(description, name=description.name or path.resolve().name)

    def names(self) -> Iterable[str]:
        return ()

    def __contains__(self, name: str) -> bool:
        return False

    def tensor(self, name: str) -> StoredTensor:
        raise CheckpointError(f"{self.path.name} has no tensor '{name}'", "it is opened for dummy weights")

    def release(self, name: str) -> None:
        pass

    def float_type(self) -> str:
        return float_type_of(self._config)

    def is_quantized(self) -> bool:
        return bool(self._quantization)

    def stores_halves(self) -> bool:
        return not self._quantization and self.float_type() == "float16"

    def quantization(self) -> dict[str, object]:
        return self._quantization
