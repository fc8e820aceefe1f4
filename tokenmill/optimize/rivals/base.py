"""The contract of a rival: another engine that serves the same checkpoint, measured as our own candidates are.

A rival says whether it is installed, whether it can serve a file and why not, and starts a server with the launch line
that `deploy` writes for it; only the address is changed to a free port of this machine. Knows nothing of what is
measured. Called by measure.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill.deploy.engines.base import Launch
from tokenmill.deploy.render import find_engine
from tokenmill.deploy.serving import Serving, object_name
from tokenmill.errors import UserError
from tokenmill.hardware.catalog import Device, load_catalog
from tokenmill.hardware.machine import detect_machine
from tokenmill.optimize.rivals.process import RunningServer, free_port

LOCAL = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RivalWorkload:
    """What a server is started for, in tokens and requests at a time."""

    context: int
    concurrency: int
    batch_tokens: int = 2048
    ready_seconds: float = 300.0


class Rival(ABC):
    name: str
    engine: str  # as deploy names it
    dialect: str = ""  # of its requests; empty: found out by asking

    @abstractmethod
    def missing(self) -> str:
        """How to install it; empty if it is."""

    @abstractmethod
    def version(self) -> str: ...

    @abstractmethod
    def serves(self, path: Path) -> str:
        """Why it cannot serve this checkpoint on this machine; empty if it can."""

    def start(self, path: Path, workload: RivalWorkload, log: Path | None = None) -> RunningServer:
        """A context manager whose `url` and `model` are known inside its block."""
        serving = serving_of(path, workload)
        launch = find_engine(self.engine).launch(serving)
        port = free_port()
        command = self.localized(launch, port)
        return RunningServer(
            command,
            f"http://{LOCAL}:{port}",
            environment=dict(launch.environment),
            log=log,
            ready_seconds=workload.ready_seconds,
        )

    def localized(self, launch: Launch, port: int) -> list[str]:
        """The launch line for this machine and port."""
        return with_address(launch.command, port)


def serving_of(path: Path, workload: RivalWorkload) -> Serving:
    """The checkpoint as it is: nothing is quantized on the way."""
    return Serving(
        model=str(path),
        name=object_name(path.name),
        device=this_device(),
        max_sequences=workload.concurrency,
        batch_tokens=workload.batch_tokens,
        context=workload.context,
        users=workload.concurrency,
    )


def with_address(command: Sequence[str], port: int) -> list[str]:
    """The launch line with `--host` and `--port` of a server for this process only."""
    words = list(command)
    for flag, value in (("--host", LOCAL), ("--port", str(port))):
        if flag in words:
            words[words.index(flag) + 1] = value
        else:
            words += [flag, value]
    return words


def this_device() -> Device:
    """What decides an engine's flags: the kind of device and the dtypes it multiplies."""
    gpus = detect_machine().gpus
    if not gpus:
        return Device("this machine", "", "cpu", "", 0.0, 0.0, 0.0, {"fp32": 1.0})
    try:
        return load_catalog().find_device(gpus[0])
    except UserError:  # not in the catalog
        return Device(gpus[0], "", "gpu", "", 0.0, 0.0, 0.0, {"bf16": 1.0})


def is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def is_hf_folder(path: Path) -> bool:
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))
