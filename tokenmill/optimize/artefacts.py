"""Quantized candidates on disk, made once: kept in the cache folder under a hash of the source and the recipe.

Runs the quantization jobs without their gate (the loop's own is stricter) and stores their reports. Knows nothing
of speed or quality. Called by the loop.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tokenmill import __version__
from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.gguf_writer import TensorSlot
from tokenmill.checkpoint.sources.cache import cache_root, write_json
from tokenmill.errors import UserError
from tokenmill.evaluate.identity import model_hash
from tokenmill.optimize.candidates import WeightChoice
from tokenmill.optimize.results import Artefact
from tokenmill.quantize.finish import GateRequest
from tokenmill.quantize.ggml.export import plan_slots
from tokenmill.quantize.ggml.mixes import find_mix
from tokenmill.quantize.ggml.source_tensors import SourceTensors
from tokenmill.quantize.gguf_job import GGUFJob, run_gguf_job
from tokenmill.quantize.job import QuantizeJob, prepare, run_job
from tokenmill.quantize.recipe import RecipeRequest

CALIBRATION_SAMPLES = 32
CALIBRATION_LENGTH = 256
_WEIGHT_FILES = (".safetensors", ".gguf")

Progress = Callable[[int, int, float], None]


class NotEnoughTimeError(UserError):
    """The candidate may work, but there is not enough time left to make it."""


class ArtefactCache:
    """Makes and finds the artefacts of one source model."""

    def __init__(self, source: Path, checkpoint: Checkpoint, model: str, threads: int) -> None:
        self.source = source
        self.checkpoint = checkpoint
        self.digest = model_hash(source)
        self.folder = cache_root() / "optimize" / self.digest[:16]
        self._tensors = SourceTensors(checkpoint)  # read once: every mix is planned on it
        self._model = model  # as the user named it, for commands
        self._threads = threads

    def path(self, choice: WeightChoice) -> Path:
        if choice.is_stored:
            return self.source
        recipe = [__version__, choice.name, CALIBRATION_SAMPLES, CALIBRATION_LENGTH]
        digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:10]
        name = choice.name.replace(":", "-").replace("+", "-")
        return self.folder / (f"{name}-{digest}" + (".gguf" if choice.mix else ""))

    def find(self, choice: WeightChoice) -> Artefact | None:
        """The artefact if it was made before and is still complete; else None."""
        path = self.path(choice)
        if choice.is_stored:
            return self._stored()
        try:
            content = json.loads(self._note(path).read_text(encoding="utf-8"))
            artefact = Artefact(**{**content, "layers": tuple(content["layers"])})
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return artefact if path.exists() and weight_bytes(path) == artefact.nbytes else None

    def make(self, choice: WeightChoice, seconds_left: float, on_block: Progress) -> Artefact:
        """Quantize; refuses a job that would take longer than `seconds_left`."""
        path = self.path(choice)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.discard(choice)
        off = GateRequest(enabled=False, threads=self._threads)
        if choice.mix:
            method = "imatrix" if choice.importance else "rtn"
            job = GGUFJob(
                str(self.source), path, method, choice.mix, None, None, CALIBRATION_SAMPLES, self.calibration_length
            )
            report = run_gguf_job(job, off, 0, on_block)
        else:
            prepared = prepare(self._job(choice, path, off))
            if prepared.forecast.seconds > seconds_left:
                raise NotEnoughTimeError(
                    f"quantizing would take about {prepared.forecast.seconds:.0f} s and {max(0, seconds_left):.0f} s "
                    "are left for it",
                    "give more --minutes",
                )
            report = asdict(run_job(prepared, on_block))
        artefact = Artefact(
            path=str(path),
            nbytes=weight_bytes(path),
            bits_per_weight=report["bits_per_weight"],
            seconds=report["seconds"],
            command=self.command(choice),
            layers=tuple(
                {key: layer[key] for key in ("name", "type_name", "relative_error")} for layer in report["layers"]
            ),
        )
        write_json(self._note(path), asdict(artefact))
        return artefact

    def discard(self, choice: WeightChoice) -> None:
        """Delete an artefact that is no longer needed; it can be made again."""
        path = self.path(choice)
        assert path != self.source
        self._note(path).unlink(missing_ok=True)
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)

    def command(self, choice: WeightChoice) -> str:
        if choice.is_stored:
            return f"tokenmill pull {self._model}"
        words = ["tokenmill quantize", self._model]
        if choice.mix:
            words += ["--method imatrix"] if choice.importance else []
            words += [f"--type {choice.mix}"]
        else:
            words += [f"--method {choice.method}"] + ([f"--bits {choice.bits}"] if choice.bits else [])
        if choice.method or choice.importance:
            words += [f"--calibration-samples {CALIBRATION_SAMPLES} --calibration-length {self.calibration_length}"]
        name = choice.name.replace(":", "-").replace("+", "-")
        return " ".join([*words, "--no-gate", f"--out {name}" + (".gguf" if choice.mix else "")])

    @property
    def calibration_length(self) -> int:
        return min(CALIBRATION_LENGTH, self.checkpoint.description.context_length)

    def forecast_bytes(self, choice: WeightChoice) -> int:
        """Upper bound of the disk space it takes: methods are counted as float16."""
        if choice.is_stored or self.find(choice):
            return 0
        return sum(slot.nbytes for slot in self.slots(choice.mix or "F16"))

    def slots(self, mix: str) -> list[TensorSlot]:
        """The tensors of a mix with their types, without quantizing."""
        return plan_slots(self._tensors, find_mix(mix), has_importance=False)

    def _job(self, choice: WeightChoice, path: Path, gate: GateRequest) -> QuantizeJob:
        return QuantizeJob(
            model=str(self.source),
            out=path,
            recipe=RecipeRequest(choice.method, choice.bits),
            calibration_samples=CALIBRATION_SAMPLES,
            calibration_length=self.calibration_length,
            threads=self._threads,
            restart=True,
            gate=gate,
        )

    def _stored(self) -> Artefact:
        nbytes = weight_bytes(self.source)
        parameters = sum(math.prod(slot.shape) for slot in self.slots("F16"))
        return Artefact(str(self.source), nbytes, 8 * nbytes / parameters, 0.0, f"tokenmill pull {self._model}")

    @staticmethod
    def _note(path: Path) -> Path:
        return path.with_name(path.name + ".json")


def weight_bytes(path: Path) -> int:
    """Bytes of the weights: the file, or the weight files of a directory."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.iterdir() if file.suffix in _WEIGHT_FILES)
