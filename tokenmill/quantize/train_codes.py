"""Codes trained end to end: what the last pass learns of a matrix where it may also change its codes.

Roundings pass gradients straight through, as in qat, but the loss is the whole model's divergence from the unquantized
one. Training begins at the solver's codes, each weight as near to the next one as what was rounded asks for. A code is
noise until many thousand tokens have spoken for it, so this wants far more text than scales do: sequences that the
model draws itself. Knows matrices and the files of a killed pass; the descent is tune.py's, the rest tune_job.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.model.formats.quantized import QuantizedMatrix
from tokenmill.quantize.methods.qat import TrainedMatrix
from tokenmill.quantize.recipe import Recipe
from tokenmill.quantize.tune import TuneOptions
from tokenmill.quantize.workspace import Workspace

_log = get_logger(__name__)
RATE = 3e-3  # of a code, in steps of its grid
_SCALES, _NORMS = 0.1, 0.1  # shares of it
_MEASURED_BITS = 2  # at which it wins
_NEAREST = 0.49  # of a step, that a weight may lie from its code


def check_trainable(steps: int, tune: int, recipe: Recipe, samples: int) -> None:
    """Refused before any long work."""
    if (steps or tune) and samples < 2:
        raise UserError(
            "one calibration sequence cannot be learned from and held out too", "give --calibration-samples 2 or more"
        )
    if not steps:
        return
    if tune:
        raise UserError("--train-codes learns scales and norms as well", "leave --tune-scales out")
    if any(scheme.element != "int" for scheme in (recipe.scheme, *recipe.scheme_of.values())):
        raise UserError(f"--train-codes trains integers, not what {recipe.method} makes", "use gptq or qat")
    if any(step.makes_zeros for step in recipe.transforms):
        raise UserError("--train-codes would fill what was pruned", "leave one of the two out")
    if max(scheme.bits for scheme in (recipe.scheme, *recipe.scheme_of.values())) > _MEASURED_BITS:
        _log.warning(
            "--train-codes is for 2 bits: at 3 and 4 it lost to --option metric=fisher --tune-scales 80 where it was "
            "measured"
        )


def training_options(steps: int) -> TuneOptions:
    return TuneOptions(steps, rate=RATE, norms=_NORMS)


class TrainedCodes:
    """`residual` [out, in]: what rounding to `matrix` left of the weights."""

    shares = (1.0, _SCALES)

    def __init__(self, matrix: QuantizedMatrix, residual: Tensor) -> None:
        self.matrix, self._residual = matrix, residual.half()
        self._trained: TrainedMatrix | None = TrainedMatrix(matrix.dequantize(), matrix.scheme, matrix)
        codes = self._trained.codes.detach()
        offsets = residual.float().view_as(codes) / self._trained.first
        self._trained.codes = codes + offsets.clamp_(-_NEAREST, _NEAREST)
        self._trained.growth = self._trained.growth.detach()
        self.factors = [self._trained.codes, self._trained.growth]

    def weight(self) -> Tensor:
        return self.matrix.dequantize() if self._trained is None else self._trained.dequantize()

    def reset(self) -> None:
        self._trained = None

    @torch.no_grad()
    def finish(self) -> TrainedResult:
        matrix = self.matrix if self._trained is None else self._trained.finish()
        values = self.matrix.dequantize()
        wanted = values + self._residual
        error = float((wanted - matrix.dequantize()).norm() / wanted.norm().clamp(min=1e-30))
        return TrainedResult(matrix, error, int((matrix.codes != self.matrix.codes).sum()))


@dataclass(frozen=True, slots=True)
class TrainedResult:
    matrix: QuantizedMatrix
    error: float  # relative, to what the solver was to round
    moved: int  # codes that are others than the solver's


class KeptTraining:
    """Progress of the pass in the job's workspace."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace, self._path = workspace, workspace.learned("training")

    def load(self) -> tuple[int, Iterable[Tensor]]:
        if not self._path.exists():
            return 0, ()
        with safe_open(self._path, "pt") as file:
            return int(file.metadata()["steps"]), self._read(len(file.keys()))

    def _read(self, count: int) -> Iterator[Tensor]:
        """One after the other: together they are as large as all that is trained."""
        with safe_open(self._path, "pt") as file:
            for number in range(count):
                yield file.get_tensor(str(number))

    def save(self, steps: int, tensors: Sequence[Tensor]) -> None:
        kept = {str(number): each.detach().cpu() for number, each in enumerate(tensors)}
        self._workspace.save(self._path, kept, {"steps": str(steps)})


def more_bytes(weights: int) -> int:
    """Beside what learning scales takes: codes as floats and their moments, and the residuals they begin with."""
    return (3 * 4 + 2) * weights


def more_operations(weights: int, steps: int) -> float:
    """Rounding, its gradient and Adam's step of each weight, in operations of a product of the same time."""
    return 3000.0 * weights * steps
