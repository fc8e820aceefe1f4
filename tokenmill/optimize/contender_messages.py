"""What a contender can be asked, and what it answers: records that cross the pipe as one line of JSON each.

One command at a time, each with a deadline; the answer is a record or a failure. Called by contender.py (the parent's
side) and contender_process.py (the child's).
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from tokenmill.bench.prompts import SyntheticRequest
from tokenmill.config import EngineConfig
from tokenmill.optimize.quality import QualityPlan
from tokenmill.optimize.records import from_plain, to_plain
from tokenmill.quantize.schemes import METHODS, Method
from tokenmill.registry import Registry

T = TypeVar("T")

# Tables that programs may register names in: a child has those of its parent.
REGISTRIES = (
    "tokenmill.model.kvstore:KV_STORES",
    "tokenmill.model.formats.files:FILE_FORMATS",
    "tokenmill.runtime.speculation:DRAFTERS",
    "tokenmill.quantize.methods:TRANSFORMS",
    "tokenmill.quantize.methods:SOLVERS",
)


@dataclass(frozen=True, slots=True)
class Begin:
    """The first message to a child. `registered`: registry -> name -> import path."""

    search_path: list[str]
    registered: dict[str, dict[str, str]]
    methods: dict[str, Method]


@dataclass(frozen=True, slots=True)
class Load:
    """Load an engine; the one before is closed. `device_bytes`: of GPU memory that it may take, 0: all that is free."""

    path: Path
    config: EngineConfig
    device_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WarmUp:
    request: SyntheticRequest


@dataclass(frozen=True, slots=True)
class RunRequests:
    requests: list[SyntheticRequest]


@dataclass(frozen=True, slots=True)
class AskMemory:
    device: str


@dataclass(frozen=True, slots=True)
class Unload:
    pass


@dataclass(frozen=True, slots=True)
class BuildWeights:
    """Quantize `source` into `path`. `slowdown`: actual over forecast seconds of earlier builds."""

    source: Path
    path: Path
    mix: str
    method: str
    bits: int | None
    importance: bool
    samples: int
    length: int
    threads: int
    device: str
    seconds: float
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class TrainDrafter:
    """Train a draft head of `kind` for the model at `model` into `path`."""

    model: Path
    path: Path
    kind: str
    tokens: int
    steps: int
    config: EngineConfig
    seconds: float
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class Judge:
    """Compare a candidate with the reference: on the short text, or everything (`whole`)."""

    plan: QualityPlan
    reference: Path
    reference_config: EngineConfig
    path: Path
    config: EngineConfig
    whole: bool


Command = Load | WarmUp | RunRequests | AskMemory | Unload | BuildWeights | TrainDrafter | Judge
COMMANDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Load, WarmUp, RunRequests, AskMemory, Unload, BuildWeights, TrainDrafter, Judge)
}


@dataclass(frozen=True, slots=True)
class Ready:
    pass


@dataclass(frozen=True, slots=True)
class Loaded:
    memory_bytes: int  # weights and KV pages
    seconds: float


@dataclass(frozen=True, slots=True)
class Memory:
    device_free_bytes: int


@dataclass(frozen=True, slots=True)
class Built:
    """`forecast`: seconds that were expected before `slowdown`, 0 where there is no forecast."""

    seconds: float
    forecast: float
    bits_per_weight: float = 0.0
    layers: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Done:
    pass


@dataclass(frozen=True, slots=True)
class Failure:
    """`kind`: "user" | "time" (forecast to take too long) | "error"."""

    text: str
    kind: str = "error"


def encode_command(command: Any, seconds: float) -> bytes:
    return _line({"command": type(command).__name__, "seconds": seconds, "content": to_plain(command)})


def decode_command(line: bytes) -> tuple[Any, float]:
    """(command, seconds that it may take)."""
    message = json.loads(line)
    return from_plain(COMMANDS[message["command"]], message["content"]), message["seconds"]


def encode_answer(answer: Any) -> bytes:
    name = "failure" if isinstance(answer, Failure) else "answer"
    return _line({name: to_plain(answer)})


def decode_answer(line: bytes, kind: type[T]) -> T | Failure:
    message = json.loads(line)
    if "failure" in message:
        return from_plain(Failure, message["failure"])
    return from_plain(kind, message["answer"])


def encode_begin() -> bytes:
    registered = {path: _registry(path).entries() for path in REGISTRIES}
    return _line(to_plain(Begin(list(sys.path), registered, METHODS)))


def begin(line: bytes) -> None:
    """In the child: everything that is registered in the parent."""
    message = from_plain(Begin, json.loads(line))
    sys.path += [each for each in message.search_path if each not in sys.path]
    for path, entries in message.registered.items():
        registry = _registry(path)
        for name, target in entries.items():
            if name not in registry:
                registry.register(name, target)
    METHODS.update(message.methods)


def _registry(path: str) -> Registry:
    module, name = path.split(":")
    registry: Registry = getattr(import_module(module), name)
    return registry


def _line(content: Any) -> bytes:
    return json.dumps(content).encode() + b"\n"
