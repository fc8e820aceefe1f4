"""The search space: weight choices, KV dtypes, batch sizes and drafters, all by the names of the registries.

A weight choice is a GGUF mix (`Q4_K_M`), a mix weighted by importance (`imatrix:Q4_K_M`), a method with its bits
(`gptq-4`, `smoothquant+gptq`), or `stored`: the checkpoint as it is. Everything registered is considered; nothing here
lists names. Knows neither time nor quality. Called by the loop and the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.errors import UserError, unknown_name
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.kvstore.dense import DenseStore
from tokenmill.quantize.ggml.mixes import MIXES
from tokenmill.quantize.recipe import compose
from tokenmill.quantize.schemes import METHODS
from tokenmill.runtime.speculation import DRAFTERS

STORED = "stored"
_IMPORTANCE = "imatrix:"
_TRIED_BITS = (4, 8)  # for methods that accept several widths
_BATCH_TOKENS = (512, 2048)


@dataclass(frozen=True, slots=True)
class Candidate:
    weights: str
    kv: str
    batch_tokens: int
    speculate: str = "off"

    @property
    def name(self) -> str:
        settings = f"{self.weights}/{self.kv}/{self.batch_tokens}"
        return settings if self.speculate == "off" else f"{settings}/{self.speculate}"


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


def registered_methods() -> list[str]:
    names: list[str] = []
    for name, method in METHODS.items():
        names += [f"{name}-{bits}" for bits in _TRIED_BITS] if method.free_bits else [name]
    return names


def registered_weights(stored_is_quantized: bool) -> list[str]:
    """Every quantized choice, by name. Unquantized mixes compete as baselines."""
    mixes = [mix for mix in MIXES.values() if not mix.is_plain]
    weighted = [_IMPORTANCE + mix.name for mix in mixes if _digit(mix.name) < 6]
    return [*([STORED] if stored_is_quantized else []), *(mix.name for mix in mixes), *weighted, *registered_methods()]


def unquantized_weights() -> list[str]:
    return [mix.name for mix in MIXES.values() if mix.is_plain]


def unquantized_kv() -> list[str]:
    """KV dtypes that hold plain floats."""
    return [name for name in KV_STORES if _is_dense(name)]


def chosen_names(requested: Sequence[str], known: Sequence[str], kind: str) -> list[str]:
    """The names the user restricted the search to, or all that are registered."""
    names = [part.strip() for each in requested for part in each.split(",") if part.strip()]
    if kind == "weights":
        return list(dict.fromkeys(parse_weights(name).name for name in names)) or list(known)
    for name in names:
        if name not in known:
            raise unknown_name(kind, name, known)
    return list(dict.fromkeys(names)) or list(known)


def batch_choices(prompt_tokens: int) -> list[int]:
    """Values of batch_tokens worth trying: those that differ for `prompt_tokens` arriving together."""
    return [size for number, size in enumerate(_BATCH_TOKENS) if number == 0 or prompt_tokens > _BATCH_TOKENS[0]]


def ready_drafters() -> list[str]:
    """Drafters that work with any model."""
    return [name for name in DRAFTERS if getattr(DRAFTERS.get(name), "ready_made", False)]


def _is_dense(name: str) -> bool:
    try:
        return issubclass(KV_STORES.get(name), DenseStore)
    except Exception:  # a store that cannot be imported is tried and recorded as failed
        return False


def _digit(name: str) -> int:
    return next((int(letter) for letter in name if letter.isdigit()), 8)
