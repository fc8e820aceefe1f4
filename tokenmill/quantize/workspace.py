"""The job's directory OUT.partial: finished blocks, the hidden states after the last one, and the key of the job.

Makes a job resumable. Files appear under their final name only when complete, states before the block they follow,
so that a job killed at any moment can be resumed. Knows nothing of what the tensors mean. Used by the job.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokenmill.errors import UserError

_JOURNAL, _EDGES, _RESULT = "journal.json", "edges.safetensors", "result"
_STATES, _FLOAT_STATES = "states", "float_states"


class Workspace:
    def __init__(self, out: Path, key: str, restart: bool = False) -> None:
        """`key` says what the job is; blocks of another job are never continued."""
        self.path = out.with_name(out.name + ".partial")
        if restart and self.path.exists():
            shutil.rmtree(self.path)
        if self.path.exists() and self._stored_key() != key:
            raise UserError(
                f"{self.path} holds the unfinished work of another job",
                "run that job again to finish it, or give --restart to discard its work",
            )
        with full_disk_explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            _write_text(self.path / _JOURNAL, json.dumps({"key": key}))

    def _stored_key(self) -> str | None:
        try:
            journal = json.loads((self.path / _JOURNAL).read_text())
        except (OSError, ValueError):
            return None
        return journal.get("key") if isinstance(journal, dict) else None

    @property
    def result(self) -> Path:
        """The directory in which the finished files are assembled."""
        return self.path / _RESULT

    @property
    def edges(self) -> Path:
        return self.path / _EDGES

    def learned(self, name: str) -> Path:
        """What a step learned before the first block."""
        return self.path / f"learned-{name}.safetensors"

    def block(self, index: int) -> Path:
        return self.path / f"block-{index:05d}.safetensors"

    def raw(self, index: int) -> Path:
        """Codes and scales of a block, in jobs that tune all blocks at the end."""
        return self.path / f"raw-{index:05d}.safetensors"

    def low_rank(self, index: int) -> Path:
        """The factors of what rounding a block lost, in jobs that write an adapter."""
        return self.path / f"low-rank-{index:05d}.safetensors"

    def _states(self, index: int) -> Path:
        return self.path / f"states-{index:05d}.safetensors"

    def num_finished(self, needs_states: bool) -> int:
        """Number of finished blocks; with calibration, those whose following states exist as well."""
        count = 0
        while self.block(count).exists():
            count += 1
        while needs_states and count and not self._states(count).exists():
            count -= 1
        return count

    def save_block(self, index: int, tensors: Mapping[str, Tensor], report: Mapping[str, Any]) -> None:
        self.save(self.block(index), tensors, {"report": json.dumps(report)})

    def block_report(self, index: int) -> dict[str, Any]:
        with safe_open(self.block(index), "pt") as file:
            report: dict[str, Any] = json.loads(file.metadata()["report"])
        return report

    def save_states(self, index: int, states: Tensor, float_states: Tensor | None = None) -> None:
        """The inputs of block `index`, and those of the float model where a method needs them."""
        both = {_STATES: states} if float_states is None else {_STATES: states, _FLOAT_STATES: float_states}
        self.save(self._states(index), both)

    def load_states(self, index: int) -> tuple[Tensor, Tensor | None]:
        stored = load_file(self._states(index))
        float_states = stored.get(_FLOAT_STATES)
        return stored[_STATES].clone(), None if float_states is None else float_states.clone()

    def drop_states(self, index: int) -> None:
        self._states(index).unlink(missing_ok=True)

    def write_json(self, name: str, content: Any) -> None:
        """Store a decision that a resumed job must not make again."""
        with full_disk_explained(self.path):
            _write_text(self.path / f"{name}.json", json.dumps(content))

    def read_json(self, name: str) -> Any:
        """What `write_json` stored under this name, or None."""
        path = self.path / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def save(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        partial = path.with_suffix(".writing")
        with full_disk_explained(self.path):
            save_file({name: each.contiguous() for name, each in tensors.items()}, partial, dict(metadata or {}))
            os.replace(partial, path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def full_disk_explained(path: Path) -> Iterator[None]:
    """Turn write errors into user errors; the finished blocks are kept."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        if not full:
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(f"cannot write {path}: {reason}", "check the path and its permissions") from None
        raise UserError(
            f"the disk of {path} is full", "make room and run the same command again: it resumes at the last block"
        ) from None


def _write_text(path: Path, text: str) -> None:
    partial = path.with_suffix(".writing")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
