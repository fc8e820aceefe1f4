"""What a killed run continues from: factors, moments of the optimizer, the step and the curves so far.

One file, replaced whole, so that there is always a complete one. A key says which run it is of: model, data and
settings; another run's state is never continued. No pickle. Used by job.py.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tokenmill.errors import UserError

_FILE = "state.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class Progress:
    step: int = 0  # done
    losses: list[float] = field(default_factory=list)  # of each step, nats a token
    held_out: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss)
    seconds: float = 0.0


class RunState:
    def __init__(self, out: Path, key: str, restart: bool = False) -> None:
        self.path = out.with_name(out.name + ".partial")
        self._key = key
        if restart and self.path.exists():
            shutil.rmtree(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}", "check the path") from None

    def save(self, progress: Progress, parameters: Mapping[str, Tensor], optimizer: torch.optim.AdamW) -> None:
        tensors: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            tensors[name] = parameter.detach()
            for moment in _MOMENTS:
                if moment in optimizer.state[parameter]:
                    tensors[f"{moment}:{name}"] = optimizer.state[parameter][moment]
        journal = {
            "key": self._key,
            "progress": json.dumps([progress.step, progress.losses, progress.held_out, progress.seconds]),
        }
        partial = self.path / f"{_FILE}.writing"
        stored = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        try:
            save_file(stored, partial, journal)
            os.replace(partial, self.path / _FILE)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"cannot write {self.path}: {error}", "make room, then run the same command again"
            ) from None

    def load(self, parameters: Mapping[str, Tensor], optimizer: torch.optim.AdamW) -> Progress:
        """Fill parameters and optimizer from the file; nothing done where there is none."""
        if not (self.path / _FILE).is_file():
            return Progress()
        try:
            with safe_open(str(self.path / _FILE), framework="pt") as file:
                journal = file.metadata() or {}
                if journal.get("key") != self._key:
                    raise UserError(
                        f"{self.path} holds the unfinished work of another run",
                        "run that command again to finish it, or give --restart to discard its work",
                    )
                step, losses, held_out, seconds = json.loads(journal["progress"])
                for name, parameter in parameters.items():
                    parameter.data.copy_(file.get_tensor(name))
                    if step:
                        moments = {each: file.get_tensor(f"{each}:{name}").to(parameter.device) for each in _MOMENTS}
                        optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
        except (SafetensorError, KeyError, ValueError) as error:
            raise UserError(f"{self.path / _FILE} is damaged: {error}", "give --restart to begin anew") from None
        return Progress(step, losses, [(int(at), float(loss)) for at, loss in held_out], seconds)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
