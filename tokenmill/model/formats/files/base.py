"""The contract of a quantized file format that we write: what it can hold, its tensors, and its `quantization_config`.

The tensors are packed by the weight formats one folder up; a file format says which of them it uses, how a whole model
is described so that other tools load it, and rejects beforehand what it cannot store. Called by `quantize` and
`convert`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme

Shape = tuple[int, int]


class FileFormat(ABC):
    """Has no state: use the class itself, `FILE_FORMATS.get(name)`."""

    name: str
    one_scheme: str = ""  # non-empty: why all matrices of a model must share one scheme

    @classmethod
    @abstractmethod
    def refuses(cls, scheme: Scheme, shape: Shape) -> str | None:
        """Why a matrix of this shape and scheme cannot be written, and what to do instead; None if it can."""

    @classmethod
    @abstractmethod
    def encode(cls, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        """The tensors of one matrix by suffix ("weight_packed", ...). Loses nothing of what `refuses` lets through,
        unless the format's own description says so."""

    @classmethod
    @abstractmethod
    def quantization_config(cls, schemes: Mapping[str, Scheme], ignored: Sequence[str]) -> dict[str, object]:
        """The section of config.json. `schemes`: by module name as in the file; `ignored`: linears kept dense."""

    @classmethod
    def check(cls, schemes: Mapping[str, Scheme], shapes: Mapping[str, Shape]) -> None:
        """Raise a UserError for the first thing about this model that the format cannot hold."""
        for name, scheme in schemes.items():
            reason = cls.refuses(scheme, shapes[name])
            if reason is not None:
                problem, _, remedy = reason.partition("; ")
                raise UserError(f"{cls.name} cannot hold {name}: {problem}", remedy)
        if cls.one_scheme and len(set(schemes.values())) > 1:
            raise UserError(
                f"{cls.name} cannot hold a mix of schemes: {cls.one_scheme}", "write it as compressed-tensors"
            )


def refuses_integers(scheme: Scheme, shape: Shape, bits: Sequence[int]) -> str | None:
    """What the integer-only formats (GPTQ, AWQ) have in common."""
    if scheme.element != "int":
        return f"it stores integers, not {scheme.element}; write it as compressed-tensors"
    if scheme.activations != "none":
        return "it cannot express quantized activations; write it as compressed-tensors"
    if scheme.bits not in bits:
        return f"it has {' or '.join(map(str, bits))} bits, not {scheme.bits}; write it as compressed-tensors"
    if scheme.block_rows != 1:
        return "it needs a scale per row or group; use --group-size"
    return refuses_groups(scheme, shape)


def refuses_groups(scheme: Scheme, shape: Shape) -> str | None:
    if scheme.group_size and shape[1] % scheme.group_size:
        return f"{shape[1]} columns are no multiple of {scheme.group_size}; use a --group-size that divides them"
    return None
