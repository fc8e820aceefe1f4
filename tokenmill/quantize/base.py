"""The contract of a quantization method: its input for one block of the model, and its result.

Two kinds of step make up a recipe. A `Transform` rewrites float weights without changing the function (scales moved
into norms, rotations); a `Solver` turns each matrix into a QuantizedMatrix. Both see one block at a time through
`BlockView` and know nothing of files, formats or the job's bookkeeping. Solvers' arithmetic lives in pure functions, on
the device of their tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from torch import Tensor

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.errors import UserError, unknown_name
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme

SAMPLE_ROWS = 4096  # calibration tokens whose inputs are kept for methods that need samples


@dataclass(frozen=True, slots=True)
class Statistics:
    """Calibration statistics of the input of a group of linears. Fields that were not requested are None."""

    num_tokens: int
    hessian: Tensor | None = None  # float32 [in, in]: sum of x x^T over tokens, divided by num_tokens
    mean_square: Tensor | None = None  # float32 [in]
    mean_abs: Tensor | None = None  # float32 [in]
    max_abs: Tensor | None = None  # float32 [in]
    sample: Tensor | None = None  # float32 [n, in]: up to SAMPLE_ROWS of the rows, evenly spaced


@dataclass(frozen=True, slots=True, eq=False)
class Drift:
    """Of an input: x in the float model, y now. float32 [in, in], means over tokens; of all, and of every second
    sequence alone, so that the others can tell what of it is chance."""

    square: Tensor  # y y^T
    cross: Tensor  # x y^T
    half_square: Tensor
    half_cross: Tensor
    half: float  # share of the tokens


@dataclass(frozen=True, slots=True)
class LinearGroup:
    """Linears that read the same input, in the order of the forward pass, and what could absorb a scale of that input.

    `source` names the weight whose output channels feed this input one to one: a norm vector, or a linear (v_proj for
    o_proj, up_proj for down_proj), or None. `source_repeats` > 1: each source channel feeds that many inputs (GQA).
    """

    names: tuple[str, ...]  # canonical prefixes, such as "model.layers.3.self_attn.q_proj"
    source: str | None
    source_is_norm: bool
    source_repeats: int = 1


class BlockView(Protocol):
    """One transformer block during a job, with calibration data flowing through it. Implemented by calibrate.py."""

    index: int
    groups: Sequence[LinearGroup]
    head_dim: int

    def weight(self, name: str) -> Tensor:
        """The float32 weight [out, in] of a linear, or the vector of a norm as it multiplies (any stored offset added),
        as it is now. Names are prefixes, without ".weight"."""
        ...

    def replace(self, name: str, value: Tensor) -> None:
        """Use `value` from now on: a transformed weight, or the dequantized result, so that later groups see it."""
        ...

    def bias(self, name: str) -> Tensor | None:
        """The float32 bias [out] of a linear, as it is now, if it has one."""
        ...

    def replace_bias(self, name: str, value: Tensor) -> None: ...

    def statistics(self, group: LinearGroup, kinds: Sequence[str]) -> Statistics:
        """Run calibration data to the input of `group` with the present weights and collect the named kinds
        ("hessian", "mean_square", "mean_abs", "max_abs", "sample")."""
        ...

    def inputs(self) -> Sequence[Tensor]:
        """The block's inputs, one float32 [tokens, hidden] per calibration sequence."""
        ...

    def targets(self) -> Sequence[Tensor] | None:
        """What the block puts out for the same sequences in the float model, none of whose blocks is rounded; only in
        jobs with a step that needs it."""
        ...

    def statistics_beside_float(self, group: LinearGroup) -> tuple[Statistics, Drift | None]:
        """As `statistics` of the hessian, and how its input has drifted from the float model's; None for experts, which
        see other tokens there, and in jobs without a step that needs it. Before `targets`."""
        ...

    def forward(self, inputs: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """The block's output for a sequence [tokens, hidden], or for several [sequences, tokens, hidden], with some
        weights replaced; differentiable in them."""
        ...


# (index of a block, its groups, name of a linear, rows [tokens, out] like its outputs) -> the rows as a transform turns
# them.
OutputTurn = Callable[[int, Sequence[LinearGroup], str, Tensor], Tensor]


class ModelView(Protocol):
    """What lies outside the blocks, before the first of them is calibrated. Implemented by the job.

    Names: "model.embed_tokens", "model.norm" (the final norm, as it multiplies), "lm_head". With tied embeddings
    "lm_head" reads as the embedding, and replacing either name unties the two.
    """

    description: ModelDescription

    def weight(self, name: str) -> Tensor:
        """float32, as it is now."""
        ...

    def replace(self, name: str, value: Tensor) -> None: ...

    def scheme_of(self) -> Mapping[str, Scheme]:
        """What each linear will be rounded to."""
        ...

    def survey(self, kinds: Sequence[str]) -> Iterator[tuple[BlockView, Mapping[str, Statistics]]]:
        """Every block of the model as it was, in order, with statistics of the inputs of its linears."""
        ...

    def output_roots(self) -> list[Tensor]:
        """For each block R [hidden, hidden]: |x R|^2 is what a change x of its output costs the model's answers, see
        fisher.py. Of the model as it was: not to be used once a transform has turned the hidden states."""
        ...

    def linear_grams(self) -> dict[str, Tensor]:
        """For each linear what a change of its output costs the model's answers, likewise; [out, out], or tiles. Where
        a transform has said how it turns outputs, of the outputs as they are then."""
        ...

    def turn_outputs(self, turn: OutputTurn) -> None:
        """Said by a transform that turns what linears put out."""
        ...

    def remember(self, name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """What `make` returns; a resumed job gets what it returned the first time."""
        ...


class Step(ABC):
    """One step of a recipe. `Options` is a frozen dataclass of its own settings, with defaults."""

    name: str
    needs_calibration: bool = False
    needs_targets: bool = False  # the float model's own states run beside those of the rounded one

    @dataclass(frozen=True, slots=True)
    class Options:
        pass

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = parse_options(self.name, self.Options, options or {})

    def begin(self, model: ModelView) -> None:
        """Called once, before any block runs (and again when a job resumes: the result must be the same). A transform
        may rewrite the embedding, the final norm and the head here, and refuse a model. Does nothing by default."""
        del model

    def memory_bytes(self, shape: tuple[int, int]) -> int:
        """Upper bound of the bytes needed beside the weights, for a matrix (or stack with one input) of `shape`."""
        return 4 * 3 * shape[0] * shape[1]

    def operations(self, num_weights: int, length: int) -> float:
        """Of learning, in one block of `num_weights` with sequences of `length`, for the forecast."""
        del num_weights, length
        return 0.0

    def stack_operations(self, shape: tuple[int, int]) -> float:
        """Of a matrix, or stack with one input, of `shape`, beside statistics and their factor, for the forecast."""
        del shape
        return 0.0


class Transform(Step):
    makes_zeros: bool = False  # zeros that the steps after it must keep
    turns_states: bool = False  # hidden states between blocks are no longer those of the model as it was
    tells_outputs: bool = False  # what linears put out is as it was, or `begin` says how it is turned

    def scheme(self, scheme: Scheme) -> Scheme:
        """The scheme of the matrices once this transform has been applied: `scheme` unless it decides something."""
        return scheme

    @abstractmethod
    def apply(self, block: BlockView, scheme_of: Mapping[str, Scheme]) -> None:
        """Rewrite the block's float weights through `block.replace`."""


class Solver(Step):
    keeps_zeros: bool = False  # a weight that is zero stays zero
    needs_outputs: bool = False  # of linears, as they are before anything is rounded
    needs_states: bool = False  # between blocks, as they are in the model as it was

    def check(self, name: str, shape: tuple[int, int], scheme: Scheme) -> None:
        """Raise a UserError before any long work when this solver cannot fill `scheme` for a matrix of `shape`."""

    @abstractmethod
    def solve(self, block: BlockView, scheme_of: Mapping[str, Scheme]) -> dict[str, QuantizedMatrix]:
        """Every linear named in `scheme_of`, quantized. Must call `block.replace(name, dequantized)` as it goes."""


def parse_options(step: str, options: type, values: Mapping[str, Any]) -> Any:
    """Options from a recipe or the command line: unknown names and wrong types are refused."""
    known = {field.name: field for field in fields(options)}
    for name, value in values.items():
        if name not in known:
            raise unknown_name(f"option of {step}", name, list(known))
        default = known[name].default
        good = isinstance(value, type(default)) or (isinstance(default, float) and isinstance(value, int))
        if not good or (isinstance(value, bool) and not isinstance(default, bool)):
            raise UserError(
                f"{step}: {name} is {value!r}, expected a {type(default).__name__}", f"the default is {default!r}"
            )
    return options(**values)
