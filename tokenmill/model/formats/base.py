"""The contract of a weight format: how a matrix is stored and which numbers it represents.

A format is detected by the tensors present, never by a file name. It knows nothing of the method that chose the values
(GPTQ, AWQ and round-to-nearest share one format). `dequantize` is the spec; kernels multiply from `parts()`, which are
numpy arrays where the model was read without torch (model/host_reader.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from tokenmill.kernels.base import Choice

if TYPE_CHECKING:
    from torch import Tensor

    from tokenmill.checkpoint.base import Checkpoint


class LinearWeight(ABC):
    """A matrix [out_features, in_features] in its stored form, with an optional float32 bias."""

    format_name: str
    type_name: str  # for people and kernels: "Q4_K", "F16", ...
    out_features: int
    in_features: int
    bias: Tensor | None = None
    precise: bool = False  # set by the architecture: see kernels/base.py
    activations: str = "none"  # how the scheme rounds the input of the product: see kernels/rounding.py
    input_scale: float | None = None  # the calibrated scale that some roundings need
    kernel: Choice | None = None  # set by the loader: the kernel that multiplies
    # How ranks share it: "" (each has all of it), "outputs" (its rows, put together), "gather" (the same, and its input
    # is put together before), "sum" (its columns, results are added)
    split: str = ""
    shares: tuple[int, ...] = ()  # rows of each rank, where rows are put together
    own: tuple[range, ...] = ()  # of the whole matrix, the rows that these are (of "sum" the columns); (): all of it

    @abstractmethod
    def parts(self) -> dict[str, Tensor]: ...

    @abstractmethod
    def dequantize(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end) as float32."""

    @abstractmethod
    def dequantize_rows(self, rows: Tensor) -> Tensor:
        """Chosen rows as float32: an embedding lookup."""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts().values())


class WeightFormat(ABC):
    """One file of this folder: recognises its own tensors and loads them."""

    name: str

    @classmethod
    @abstractmethod
    def tensor_names(cls, checkpoint: Checkpoint, prefix: str) -> list[str]:
        """The tensors that make up the matrix `prefix` in this format; empty if it is not in this format."""

    @classmethod
    @abstractmethod
    def load(cls, checkpoint: Checkpoint, prefix: str) -> LinearWeight: ...
