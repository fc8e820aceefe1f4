"""Artefacts on disk, made once: quantized weights and trained drafters, in the cache folder under a hash of source and
recipe.

A GGUF mix is one file, a method makes a safetensors directory; `stored` is the source itself. Knows where they are,
whether they are complete, what they take and how long making them is expected to last; builds.py makes them. Called by
the laboratory.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

from tokenmill import __version__
from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.dummy import DummyCheckpoint
from tokenmill.checkpoint.gguf_writer import TensorSlot
from tokenmill.checkpoint.sources.base import readable_bytes
from tokenmill.checkpoint.sources.cache import cache_root, write_json
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.evaluate.identity import model_hash
from tokenmill.hardware.weight_formats import FORMATS
from tokenmill.optimize.candidates import WeightChoice
from tokenmill.optimize.contender_messages import BuildWeights, Built, TrainDrafter
from tokenmill.optimize.results import Artefact
from tokenmill.plan.question.deployment import total_weight_bytes
from tokenmill.plan.question.model_names import describe_for_planning
from tokenmill.quantize.ggml.export import plan_slots
from tokenmill.quantize.ggml.mixes import find_mix
from tokenmill.quantize.ggml.source_tensors import SourceTensors

CALIBRATION_SAMPLES = 32
CALIBRATION_LENGTH = 256
TRAINING_TOKENS, TRAINING_STEPS = 60_000, 300
_SHORTEST_FORECAST = 5.0  # seconds: below, what is forecast is less than reading and writing files
_TRAINING_WINDOW = 256  # tokens of a sequence that a head learns from
_WEIGHT_FILES = (".safetensors", ".gguf")
# `speculate` without a folder -> the kind of head that is trained
TRAINED_HEADS: Mapping[str, str] = {"head": "eagle", "tree": "eagle"}


class NotEnoughTimeError(UserError):
    """The candidate may work, but there is not enough time left to make it."""


@dataclass(slots=True)
class BuildTimes:
    """How long builds of this run took, by kind, beside what was forecast: the next forecast is corrected by it."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    slowdowns: dict[str, list[float]] = field(default_factory=dict)  # actual over forecast

    def learn(self, kind: str, built: Built) -> None:
        self.seconds.setdefault(kind, []).append(built.seconds)
        if built.forecast > 0:
            forecast = max(built.forecast, _SHORTEST_FORECAST)
            self.slowdowns.setdefault(kind, []).append(built.seconds / forecast)

    def slowdown(self, kind: str) -> float:
        """By builds of the same kind, else by all; 1 where nothing was built."""
        known = self.slowdowns.get(kind) or [each for values in self.slowdowns.values() for each in values]
        return median(known) if known else 1.0

    def expected(self, kind: str) -> float:
        """Seconds of a build without a forecast of its own; 0: unknown."""
        return median(self.seconds[kind]) if kind in self.seconds else 0.0


class ArtefactCache:
    """Finds the artefacts of one source model, and orders those that are missing."""

    def __init__(self, source: Path, checkpoint: Checkpoint, model: str, threads: int, device: str = "cpu") -> None:
        self.source = source
        self.checkpoint = checkpoint
        self.device = device
        self.digest = model_hash(source)
        self.folder = cache_root() / "optimize" / self.digest[:16]
        self.times = BuildTimes()
        self._tensors: SourceTensors | None = None
        self._model = model  # as the user named it, for commands
        self._threads = threads

    # --- weights ---

    def path(self, choice: WeightChoice) -> Path:
        if choice.is_stored:
            return self.source
        recipe: list[object] = [__version__, choice.name, CALIBRATION_SAMPLES, CALIBRATION_LENGTH]
        if choice.method or choice.importance:
            recipe.append(self.device)  # a GPU rounds differently while it calibrates
        return self.folder / (f"{_file_name(choice)}-{_digest(recipe)}" + (".gguf" if choice.mix else ""))

    def find(self, choice: WeightChoice) -> Artefact | None:
        """The artefact if it was made before and is still complete; else None."""
        path = self.path(choice)
        if choice.is_stored:
            return self._stored()
        try:
            content = json.loads(_note(path).read_text(encoding="utf-8"))
            artefact = Artefact(**{**content, "layers": tuple(content["layers"])})
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return artefact if path.exists() and weight_bytes(path) == artefact.nbytes else None

    def order(self, choice: WeightChoice, seconds: float) -> BuildWeights:
        """What to build; leftovers that cannot be resumed are removed. Refuses what is known to take longer, or more
        disk than is free."""
        require_time("quantizing", self.times.expected(_kind(choice)) if choice.mix else 0.0, seconds)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(choice)
        self.discard(choice)
        self._require_disk(choice.name, self.forecast_bytes(choice) if choice.mix else 0)
        return BuildWeights(
            source=self.source,
            path=path,
            mix=choice.mix,
            method=choice.method,
            bits=choice.bits,
            importance=choice.importance,
            samples=CALIBRATION_SAMPLES,
            length=self.calibration_length,
            threads=self._threads,
            device=self.device,
            seconds=seconds,
            slowdown=self.times.slowdown(_kind(choice)),
        )

    def record(self, choice: WeightChoice, built: Built) -> Artefact:
        """The finished artefact; from now on `find` finds it."""
        self.times.learn(_kind(choice), built)
        path = self.path(choice)
        artefact = Artefact(
            path=str(path),
            nbytes=weight_bytes(path),
            bits_per_weight=built.bits_per_weight,
            seconds=built.seconds,
            command=self.command(choice),
            layers=tuple(built.layers),
        )
        write_json(_note(path), asdict(artefact))
        return artefact

    def discard(self, choice: WeightChoice) -> None:
        """Delete an artefact that is no longer needed; it can be made again. Blocks of an unfinished job stay."""
        path = self.path(choice)
        assert path != self.source
        _note(path).unlink(missing_ok=True)
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
            words += [f"--device {self.device}"]
        return " ".join([*words, "--no-gate", f"--out {_file_name(choice)}" + (".gguf" if choice.mix else "")])

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
        if self._tensors is None:
            self._tensors = SourceTensors(self.checkpoint)  # read once: every mix is planned on it
        return plan_slots(self._tensors, find_mix(mix), has_importance=False)

    # --- drafters ---

    def drafter_path(self, choice: WeightChoice, speculate: str) -> Path:
        """The folder of the head that is trained for these weights; drafters of one kind share it."""
        kind = TRAINED_HEADS[speculate]
        recipe = [__version__, str(self.path(choice)), kind, TRAINING_TOKENS, TRAINING_STEPS, self.device]
        return self.folder / f"{kind}-{_file_name(choice)}-{_digest(recipe)}"

    def drafter_order(self, choice: WeightChoice, speculate: str, engine: EngineConfig, seconds: float) -> TrainDrafter:
        self.folder.mkdir(parents=True, exist_ok=True)
        return TrainDrafter(
            model=self.path(choice),
            path=self.drafter_path(choice, speculate),
            kind=TRAINED_HEADS[speculate],
            tokens=TRAINING_TOKENS,
            steps=TRAINING_STEPS,
            config=self._training_config(engine),
            seconds=seconds,
            slowdown=self.times.slowdown(speculate),
        )

    def with_drafter(self, artefact: Artefact, choice: WeightChoice, speculate: str) -> Artefact:
        path = self.drafter_path(choice, speculate)
        model = self._model if choice.is_stored else artefact.command.rpartition("--out ")[2]
        train = f"tokenmill train-draft {model} --kind {TRAINED_HEADS[speculate]} --text TEXT --out {speculate}"
        nbytes = artefact.nbytes + weight_bytes(path)
        return replace(artefact, nbytes=nbytes, command=f"{artefact.command} && {train}")

    def _training_config(self, engine: EngineConfig) -> EngineConfig:
        """An engine that generates what a head learns from: sequences of one window, no prefixes to keep."""
        context = min(_TRAINING_WINDOW + 1, self.checkpoint.description.context_length)
        return replace(engine, prefix_caching=False, speculate="off", context=context, batch_tokens=None)

    def _require_disk(self, name: str, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise UserError(
                f"{name} needs {readable_bytes(needed)} in {self.folder}, {readable_bytes(free)} are free",
                "make room, or set TOKENMILL_CACHE to a folder on a larger disk",
            )

    def _stored(self) -> Artefact:
        nbytes = weight_bytes(self.source)
        if isinstance(self.checkpoint, DummyCheckpoint):
            nbytes = int(total_weight_bytes(describe_for_planning(self.source), FORMATS["bf16"]))
            return Artefact(str(self.source), nbytes, FORMATS["bf16"].bits, 0.0, "")
        parameters = sum(math.prod(slot.shape) for slot in self.slots("F16"))
        return Artefact(str(self.source), nbytes, 8 * nbytes / parameters, 0.0, f"tokenmill pull {self._model}")


def weight_bytes(path: Path) -> int:
    """Bytes of the weights: the file, or the weight files of a directory."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.iterdir() if file.suffix in _WEIGHT_FILES)


def require_time(doing: str, needed: float, left: float) -> None:
    if needed > left:
        raise NotEnoughTimeError(
            f"{doing} would take about {needed:.0f} s and {max(0.0, left):.0f} s are left for it", "give more --minutes"
        )


def _note(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _kind(choice: WeightChoice) -> str:
    """Builds of one kind take alike."""
    return choice.method or ("imatrix" if choice.importance else "mix")


def _file_name(choice: WeightChoice) -> str:
    return choice.name.replace(":", "-").replace("+", "-")


def _digest(recipe: list[object]) -> str:
    return hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:10]
