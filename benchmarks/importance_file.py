"""The importance matrix of a model and a text, in the file that llama.cpp's quantizer reads: one for both sides."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.quantize.gguf_job import GGUFJob, collect_importance
from tokenmill.quantize.methods.imatrix import Importance, ImportanceMatrix
from tokenmill.quantize.source import EMBEDDING, HEAD


def write_importance(source: Path, job: GGUFJob, path: Path) -> dict[str, Tensor]:
    """Collect it as `quantize --method imatrix` does, write `path`, and return it by linear."""
    checkpoint = open_checkpoint(source)
    importance = collect_importance(checkpoint, source, job, 0, torch.device("cpu"), lambda *_: None)
    assert job.calibration is not None
    tokens = job.calibration_samples * job.calibration_length
    entries = {name: Importance(value, tokens) for name, value in importance.items()}
    description = checkpoint.description
    if description.tie_embeddings:  # llama.cpp looks for it under the name of the tensor that is stored
        entries[EMBEDDING] = entries.pop(HEAD)
    matrix = ImportanceMatrix(entries)
    matrix.write(path, description.architecture, job.calibration.name, job.calibration_length)
    return importance
