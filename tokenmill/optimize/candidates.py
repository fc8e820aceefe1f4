"""Weight choices and candidates, by the names of the registries.

A weight choice is a GGUF mix (`Q4_K_M`), a mix weighted by importance (`imatrix:Q4_K_M`), a method with its bits
(`gptq-4`, `smoothquant+gptq`), or `stored`: the checkpoint as it is. A candidate is a weight choice with the settings
of the engine that serves it. Nothing here lists names. Knows neither device, time nor quality. Called by space.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.errors import UserError, unknown_name
from tokenmill.optimize.results import CandidateResult
from tokenmill.quantize.ggml.mixes import MIXES
from tokenmill.quantize.methods import SOLVERS, TRANSFORMS
from tokenmill.quantize.recipe import compose
from tokenmill.quantize.schemes import METHODS

STORED = "stored"
_IMPORTANCE = "imatrix:"
_TRIED_BITS = (4, 8)  # for methods that accept several widths
_IMPORTANCE_BITS = 6  # mixes of fewer bits gain from importance weights


@dataclass(frozen=True, slots=True)
class Candidate:
    weights: str
    kv: str
    batch_tokens: int
    speculate: str = "off"
    options: dict[str, Any] = field(default_factory=dict)  # further fields of EngineConfig

    @property
    def name(self) -> str:
        words = [self.weights, self.kv, str(self.batch_tokens)]
        words += [self.speculate] if self.speculate != "off" else []
        return "/".join([*words, *(f"{key}={value}" for key, value in sorted(self.options.items()))])

    def result(self, name: str = "") -> CandidateResult:
        return CandidateResult(
            name or self.name, self.weights, self.kv, self.batch_tokens, self.speculate, dict(self.options)
        )


def candidate_of(result: CandidateResult) -> Candidate:
    return Candidate(result.weights, result.kv, result.batch_tokens, result.speculate, dict(result.options))


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """Exactly one of `mix` and `method` is set; neither: the checkpoint as it is."""

    name: str
    mix: str = ""
    method: str = ""
    bits: int | None = None
    importance: bool = False  # of a mix: weighted by calibration data

    @property
    def is_stored(self) -> bool:
        return not self.mix and not self.method

    @property
    def is_plain(self) -> bool:
        """Unquantized floats."""
        return bool(self.mix) and MIXES[self.mix].is_plain

    @property
    def needs_calibration(self) -> bool:
        """Whether making it runs calibration data through the model."""
        if self.importance or self.is_stored or self.mix:
            return self.importance
        steps = [(TRANSFORMS if name in TRANSFORMS else SOLVERS).get(name) for name in compose(self.method).steps]
        return any(getattr(step, "needs_calibration", False) for step in steps)


def parse_weights(name: str) -> WeightChoice:
    if name == STORED:
        return WeightChoice(STORED)
    bare = name.removeprefix(_IMPORTANCE)
    if bare.upper() in MIXES:
        mix = bare.upper()
        return WeightChoice(name.replace(bare, mix), mix=mix, importance=bare != name)
    method, dash, bits = name.rpartition("-")
    if not dash or not bits.isdigit():
        method, bits = name, ""
    try:
        compose(method)
    except UserError:
        known = [STORED, *MIXES, *registered_methods()]
        raise unknown_name("candidate", name, known) from None
    return WeightChoice(name, method=method, bits=int(bits) if bits else None)


def registered_mixes() -> list[str]:
    """Every quantized GGUF mix, then those of few bits again with importance weights. Points of grids and three levels
    are for models that do not fit otherwise: they are tried where they are named."""
    mixes = [mix.name for mix in MIXES.values() if not mix.is_plain and not mix.is_low_bit]
    return [*mixes, *(_IMPORTANCE + name for name in mixes if _digit(name) < _IMPORTANCE_BITS)]


def registered_methods() -> list[str]:
    names: list[str] = []
    for name, method in METHODS.items():
        names += [f"{name}-{bits}" for bits in _TRIED_BITS] if method.free_bits else [name]
    return names


def unquantized_mixes() -> list[str]:
    return [mix.name for mix in MIXES.values() if mix.is_plain]


def chosen_names(requested: Sequence[str], known: Sequence[str], kind: str) -> list[str]:
    """The names the user restricted the search to, or all that are registered."""
    names = [part.strip() for each in requested for part in each.split(",") if part.strip()]
    if kind == "weights":
        return list(dict.fromkeys(parse_weights(name).name for name in names)) or list(known)
    for name in names:
        if name not in known:
            raise unknown_name(kind, name, known)
    return list(dict.fromkeys(names)) or list(known)


def _digit(name: str) -> int:
    return next((int(letter) for letter in name if letter.isdigit()), 8)
