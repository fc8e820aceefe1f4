"""Mixed precision in a GGUF: a ggml type for every matrix, so that the whole model diverges least for its bytes.

Each matrix is rounded alone to the type it is likely to get and the KL divergence of the model's logits is measured;
its other types follow by their squared errors, to which a divergence is proportional while it is small. The budget is
then given out, the whole choice is measured, and kinds of matrices (all value projections, say) are made dearer or
cheaper as long as that measures better. Called by gguf_job.py; knows nothing of files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.kernels.ggml_types import TYPES
from tokenmill.log import get_logger
from tokenmill.quantize.allocation import allocate, allocate_within
from tokenmill.quantize.divergence import BlockWeights, DivergenceProbe, free_bytes
from tokenmill.quantize.forecast import operations_per_second
from tokenmill.quantize.ggml.candidates import Matrix, RoundedWeights, Rounder
from tokenmill.quantize.source import SourceModel

Progress = Callable[[int, int, float], None]
_log = get_logger(__name__)
_FACTORS = (2.0, 0.5)  # by which the worth of a kind is changed in a repair
_PASSES = 5.0  # of the calibration text: for the importance, and for the error feedback of each group
_TRIES = 4  # of meeting a limit of divergence
_MOST_PROBED_BITS = 5.6
_FITTING = 1e-3  # share of the error of a matrix's worst type: what errs less than that fits it
_LEAST_WORTH = 0.1  # of the median of a kind
_SHORT, _LONG = 64, 128  # tokens of a sequence that matrices are measured on one by one, and whole choices
_QUICK_BUDGET = 150.0  # seconds that measuring the matrices one by one may take before they are put together


@dataclass(frozen=True, slots=True)
class MixRequest:
    """`nbytes`: of all free matrices together; else the smallest choice with a divergence of at most `limit` nats."""

    nbytes: int = 0
    limit: float = 0.0
    repairs: int = 8  # whole choices that may be measured


@dataclass(frozen=True, slots=True)
class TypeChoice:
    types: dict[str, str]  # by tensor of the file
    nbytes: int
    predicted: float  # sum of the matrices' divergences
    measured: float  # of the whole, nats per token of calibration text
    seconds: float


@dataclass(frozen=True, slots=True)
class MixForecast:
    seconds: float
    layers_together: int  # neighbouring layers whose same matrices are measured as one
    quick_sequences: int
    check_sequences: int


def forecast_mix(source: SourceModel, matrices: Sequence[Matrix], repairs: int, num_tokens: int) -> MixForecast:
    """Time of the job, whose calibration text has `num_tokens`, and how coarsely matrices are measured so that it stays
    within minutes."""
    speed = operations_per_second(torch.device("cpu"))
    head = 2.0 * source.description.vocab_size * source.description.hidden_size
    blocks = 2.0 * sum(out * width for out, width in map(source.shape, source.layer_linears()))
    kinds = len(_units([each for each in matrices if _layer_of(each) == 0], 1))
    sequences, together = 4, 1

    def quick(together: int, sequences: int) -> float:
        units = kinds * -(-source.num_blocks // together)
        return units * sequences * _SHORT * (0.5 * blocks + head) / speed

    while quick(together, sequences) > _QUICK_BUDGET and together < max(1, source.num_blocks // 4):
        together += 1
    while quick(together, sequences) > _QUICK_BUDGET and sequences > 2:
        sequences -= 1
    check = 8 if blocks * 8 * _LONG / speed < 4 else 4
    whole = (repairs + 1) * check * _LONG * (blocks + head) / speed
    weights = (blocks + head) / 2
    rounding = weights * 3000.0 / speed  # packing whole matrices a few times over, and samples in every type
    calibrating = num_tokens * _PASSES * blocks / speed
    return MixForecast(calibrating + quick(together, sequences) + whole + rounding, together, sequences, check)


class MixSearch:
    """The measured worth of each matrix, and the choices made from it."""

    def __init__(self, source: SourceModel, rounder: Rounder, sequences: Tensor, forecast: MixForecast) -> None:
        self._rounder, self._forecast = rounder, forecast
        self.matrices = rounder.matrices
        weights = BlockWeights(source, cache_bytes=free_bytes() // 2)
        chosen = _spaced(sequences, forecast.quick_sequences, _SHORT)
        self._quick = DivergenceProbe(source, chosen, weights)
        self._check = DivergenceProbe(source, _spaced(sequences, forecast.check_sequences, _LONG), weights)
        self._sizes = {each.slot: {name: each.nbytes(name) for name in each.types} for each in self.matrices}
        self._errors = {each.slot: rounder.errors(each) for each in self.matrices}
        self._worth = {each.slot: 1.0 for each in self.matrices}  # divergence per squared error
        self._scale = dict.fromkeys((each.kind for each in self.matrices), 1.0)

    def measure_worth(self, progress: Progress) -> None:
        """Round each unit of matrices alone to the types that llama.cpp's mix gives them, and measure the whole
        model's divergence."""
        units = _units(self.matrices, self._forecast.layers_together)
        started, done = time.monotonic(), 0
        for batch in _batches(units):
            probed = [{each.slot: self._probe_type(each) for each in unit} for unit in batch]
            changes = [dict(RoundedWeights(self._rounder, unit)) for unit in probed]
            for unit, divergence in zip(probed, self._quick.measure(changes), strict=True):
                total = sum(self._errors[slot][name] for slot, name in unit.items())
                for slot in unit:
                    self._worth[slot] = max(divergence, 0.0) / max(total, 1e-30)
            done += len(batch)
            self._rounder.forget()
            progress(done, len(units), (time.monotonic() - started) / done * (len(units) - done))
        self._raise_least()

    def choose(self, request: MixRequest) -> TypeChoice:
        """The best choice of types for the request, measured as a whole."""
        started = time.monotonic()
        self._scale = dict.fromkeys(self._scale, 1.0)
        types = self.propose(request)
        measured = self.measure(types)
        _log.info("first choice: %.5f nats measured, %.5f predicted", measured, self.predict(types))
        improve = self._meet_limit if request.limit else self._repair
        types, measured = improve(request, types, measured)
        seconds = time.monotonic() - started
        return TypeChoice(types, self.nbytes(types), self.predict(types), measured, seconds)

    def propose(self, request: MixRequest, limit: float = 0.0) -> dict[str, str]:
        """The best choice of types by what is known of each matrix."""
        errors = self._predicted()
        if request.limit:
            return allocate_within(errors, self._sizes, limit or request.limit)
        return allocate(errors, self._sizes, request.nbytes)

    def predict(self, types: Mapping[str, str]) -> float:
        return sum(self._worth[slot] * self._errors[slot][name] for slot, name in types.items())

    def measure(self, types: Mapping[str, str]) -> float:
        """The divergence of the whole choice."""
        return self._check.measure([RoundedWeights(self._rounder, types)])[0]

    def nbytes(self, types: Mapping[str, str]) -> int:
        return sum(self._sizes[slot][name] for slot, name in types.items())

    def _repair(self, request: MixRequest, types: dict[str, str], measured: float) -> tuple[dict[str, str], float]:
        """Change the worth of one kind of matrix at a time and keep what measures better at the same bytes."""
        left, tried = request.repairs, {tuple(types.items())}
        kinds = sorted(self._scale, key=lambda kind: -sum(_bytes_of(self._sizes, self.matrices, kind, types)))
        improved = True
        while improved and left > 0:
            improved = False
            for kind in kinds:
                for factor in _FACTORS:
                    if left <= 0:
                        break
                    before = self._scale[kind]
                    self._scale[kind] = before * factor
                    changed = self.propose(request)
                    if tuple(changed.items()) in tried:
                        self._scale[kind] = before
                        continue
                    tried.add(tuple(changed.items()))
                    left -= 1
                    divergence = self.measure(changed)
                    _log.info("%s worth %g times: %.5f nats (%.5f)", kind, factor, divergence, measured)
                    if divergence < measured:
                        types, measured, improved = changed, divergence, True
                        break
                    self._scale[kind] = before
        return types, measured

    def _predicted(self) -> dict[str, dict[str, float]]:
        return {
            each.slot: {
                name: self._worth[each.slot] * self._scale[each.kind] * error
                for name, error in self._errors[each.slot].items()
            }
            for each in self.matrices
        }

    def _meet_limit(self, request: MixRequest, types: dict[str, str], measured: float) -> tuple[dict[str, str], float]:
        """A whole diverges by more or less than the sum of its parts: aim at another sum until the whole is within."""
        aim, best = request.limit, (types, measured)
        for _ in range(_TRIES):
            aim *= 0.95 * request.limit / max(measured, 1e-12)
            types = self.propose(request, aim)
            measured = self.measure(types)
            within, was = measured <= request.limit, best[1] <= request.limit
            if (within, -self.nbytes(types)) > (was, -self.nbytes(best[0])):
                best = (types, measured)
        if best[1] > request.limit:
            raise UserError(
                f"the nearest choice of types diverges by {best[1]:.4g} nats, more than {request.limit:.4g}",
                "raise --max-kld",
            )
        return best

    def _probe_type(self, matrix: Matrix) -> str:
        """The type of llama.cpp's mix, or the nearest smaller one that shows something: neither one that fits the
        weights (they were on its grid once) nor one whose divergence is lost among rounding errors."""
        errors = self._errors[matrix.slot]
        telling = [name for name in matrix.types if errors[name] > _FITTING * max(errors.values())] or [*matrix.types]
        likely = matrix.default if matrix.default in matrix.types else matrix.types[0]
        if likely in telling and TYPES[likely].bits_per_value <= _MOST_PROBED_BITS:
            return likely
        bits = min(TYPES[likely].bits_per_value, _MOST_PROBED_BITS)
        smaller = [name for name in telling if TYPES[name].bits_per_value <= bits]
        return max(smaller, key=matrix.nbytes) if smaller else min(telling, key=matrix.nbytes)

    def _raise_least(self) -> None:
        """No matrix is worth nothing, whatever a few hundred tokens say: it would get the smallest type of all."""
        known = {each.slot: self._worth[each.slot] for each in self.matrices if self._worth[each.slot] > 0}
        for kind in self._scale:
            slots = [each.slot for each in self.matrices if each.kind == kind]
            usual = [known[slot] for slot in slots if slot in known] or [*known.values()] or [1.0]
            for slot in slots:
                self._worth[slot] = max(self._worth[slot], _LEAST_WORTH * median(usual))


def check_budget(matrices: Sequence[Matrix], request: MixRequest) -> None:
    """Refuse a size that no choice of types has."""
    smallest = sum(min(map(each.nbytes, each.types)) for each in matrices)
    if not request.limit and request.nbytes < smallest:
        raise UserError(
            f"the file is {smallest - request.nbytes:,} bytes too small for the smallest types of its matrices",
            "give a larger --size",
        )


def _layer_of(matrix: Matrix) -> int:
    """-1: an edge."""
    name = matrix.prefixes[0]
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1


def _units(matrices: Iterable[Matrix], together: int) -> list[list[Matrix]]:
    """Matrices that are measured as one: q with k and gate with up (each pair acts as one factor), in neighbouring
    layers where measuring each would take too long."""
    pairs = {"self_attn.k_proj": "self_attn.q_proj", "mlp.up_proj": "mlp.gate_proj"}
    units: dict[tuple[int, str], list[Matrix]] = {}
    for each in matrices:
        layer = _layer_of(each)
        key = (layer // together if layer >= 0 else -1, pairs.get(each.kind, each.kind))
        units.setdefault(key, []).append(each)
    return list(units.values())


def _batches(units: Sequence[list[Matrix]], most: int = 8) -> Iterable[list[list[Matrix]]]:
    """Units that begin at the same layer run together."""
    by_layer: dict[int, list[list[Matrix]]] = {}
    for unit in units:
        by_layer.setdefault(_layer_of(unit[0]), []).append(unit)
    for group in by_layer.values():
        for begin in range(0, len(group), most):
            yield group[begin : begin + most]


def _bytes_of(
    sizes: Mapping[str, Mapping[str, int]], matrices: Sequence[Matrix], kind: str, types: Mapping[str, str]
) -> Iterable[int]:
    return (sizes[each.slot][types[each.slot]] for each in matrices if each.kind == kind)


def _spaced(sequences: Tensor, count: int, length: int) -> Tensor:
    """`count` evenly spaced sequences, their first tokens."""
    count = min(count, sequences.shape[0])
    return sequences[torch.arange(count) * sequences.shape[0] // count, :length]
