"""The difference of two checkpoints as an adapter of a given rank, with the share of the difference that it keeps.

Each matrix's difference is cut to its largest singular values, which by Eckart and Young is the nearest matrix of that
rank. They come from the eigenvectors of the smaller Gram matrix in float64: exact enough, and far cheaper than a full
decomposition of a tall matrix. Vectors (norms, biases) have no rank: where they differ, they are listed as left out.
Called by `tokenmill convert --extract-adapter`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tokenmill.checkpoint.adapters.adapter import EMBEDDING, Adapter, AdapterMatrix
from tokenmill.checkpoint.adapters.fit import HEAD
from tokenmill.checkpoint.adapters.join import joined_as_stored
from tokenmill.checkpoint.adapters.peft import WEIGHTS_FILE
from tokenmill.checkpoint.adapters.write import write_adapter
from tokenmill.checkpoint.configs.tensor_names import naming_of, stored_name
from tokenmill.checkpoint.identity import model_hash
from tokenmill.errors import UserError
from tokenmill.quantize.convert_source import ConvertSource

_DUST = 1e-14  # of the largest eigenvalue: below it there is nothing but rounding, and nothing to divide by
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True, slots=True)
class ExtractedModule:
    name: str
    rank: int
    energy: float  # share of the squared difference that the adapter keeps
    difference: float  # Frobenius norm of the whole difference, relative to the base


@dataclass(frozen=True, slots=True)
class ExtractReport:
    path: str
    rank: int
    energy: float  # of all modules together
    modules: tuple[ExtractedModule, ...]
    left_out: tuple[str, ...]  # vectors that differ, which an adapter of matrices cannot hold
    bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Factors:
    b: Tensor  # [out, rank]
    a: Tensor  # [rank, in]
    kept: float  # squared norms
    whole: float


def extract(
    tuned: Path,
    base: Path,
    out: Path,
    rank: int,
    base_name: str = "",
    on_matrix: Progress = lambda _done, _all, _left: None,
) -> ExtractReport:
    if rank < 1:
        raise UserError(f"--rank is {rank}", "give at least 1, such as 16")
    if out.exists():
        raise UserError(f"{out} exists", "give another output, or remove it")
    ours, theirs = ConvertSource(tuned), ConvertSource(base)
    _check_alike(ours, theirs)
    matrices: dict[str, AdapterMatrix] = {}
    modules: list[ExtractedModule] = []
    kept = whole = 0.0
    for number, prefix in enumerate(ours.matrices):
        factors, norm = _factors(ours, theirs, prefix, rank)
        if factors is not None:
            for name in _changed_modules(ours, prefix):
                matrices[name] = AdapterMatrix(name, factors.a, factors.b, 1.0)
            share = math.sqrt(factors.whole) / norm if norm else math.inf
            modules.append(ExtractedModule(prefix, factors.a.shape[0], factors.kept / factors.whole, share))
            kept, whole = kept + factors.kept, whole + factors.whole
        on_matrix(number + 1, len(ours.matrices), 0.0)
    if not matrices:
        raise UserError(f"the matrices of {tuned} and {base} are equal", "there is nothing to extract")
    adapter = Adapter(out.name, matrices, base_name=base_name or str(base), base_hash=model_hash(base))
    write_adapter(
        joined_as_stored(adapter, theirs.checkpoint),
        out,
        partial(stored_name, naming_of(ours.description.architecture)),
    )
    size = (out / WEIGHTS_FILE).stat().st_size
    return ExtractReport(str(out), rank, kept / whole, tuple(modules), _vectors(ours, theirs), size)


def _check_alike(ours: ConvertSource, theirs: ConvertSource) -> None:
    for prefix in ours.matrices:
        other = _counterpart(theirs, prefix)
        if other is None or ours.shape(prefix) != theirs.shape(other):
            found = "missing" if other is None else f"{list(theirs.shape(other))}"
            raise UserError(
                f"{prefix} is {list(ours.shape(prefix))} in {ours.checkpoint.path} and {found} in the base "
                f"{theirs.checkpoint.path}",
                "give the base that the model was tuned from",
            )


def _counterpart(base: ConvertSource, prefix: str) -> str | None:
    """Of a tied base the head is the embedding."""
    if prefix == HEAD and base.description.tie_embeddings:
        return EMBEDDING
    return prefix if prefix in base.matrices else None


def _changed_modules(tuned: ConvertSource, prefix: str) -> tuple[str, ...]:
    """Where the head is the embedding, a change of the table is one of both: adapters know them apart."""
    return (EMBEDDING, HEAD) if prefix == EMBEDDING and tuned.description.tie_embeddings else (prefix,)


def _factors(ours: ConvertSource, theirs: ConvertSource, prefix: str, rank: int) -> tuple[_Factors | None, float]:
    """The factors of a difference (None: there is none), and the norm of the base's matrix."""
    other = _counterpart(theirs, prefix)
    assert other is not None
    difference = torch.empty(ours.shape(prefix))
    square = 0.0
    for begin, end in ours.tiles(prefix):
        base = theirs.floats(other, begin, end)
        difference[begin:end] = ours.floats(prefix, begin, end) - base
        square += float(base.double().square().sum())
    ours.release(prefix)
    theirs.release(other)
    return (factorize(difference, rank) if difference.any() else None), math.sqrt(square)


def factorize(matrix: Tensor, rank: int) -> _Factors:
    """The nearest b @ a of this rank; both factors carry the square roots of the singular values."""
    values = matrix.double()
    tall = values.shape[0] >= values.shape[1]
    gram = values.T @ values if tall else values @ values.T
    squares, vectors = torch.linalg.eigh(gram)  # ascending
    count = max(1, min(rank, int((squares > _DUST * squares[-1]).sum())))
    top, chosen = squares[-count:].flip(0), vectors[:, -count:].flip(1)
    roots = top.sqrt().sqrt()  # of the singular values
    projected = (values @ chosen if tall else values.T @ chosen) / roots  # the long side, already with its root
    b, a = (projected, (chosen * roots).T) if tall else (chosen * roots, projected.T)
    return _Factors(b.float(), a.float().contiguous(), float(top.sum()), float(values.square().sum()))


def _vectors(ours: ConvertSource, theirs: ConvertSource) -> tuple[str, ...]:
    changed = [
        name
        for name in ours.vectors
        if name in theirs.vectors and not torch.equal(ours.as_used(name), theirs.as_used(name))
    ]
    return tuple(changed)
